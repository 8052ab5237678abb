"""All decode attention on the CPU, one batch, no overlap.

The first strawman of arXiv 2411.01142, section 3.1.
"""

from __future__ import annotations

from neo_server.plan import Place, Plan, View
from neo_server.policies.draft import Draft


def plan(view: View) -> Plan:
    """First come, first served; out of CPU pages, the latest arrival is recomputed later."""
    draft = Draft(view)
    kept = draft.grow(view.running, Place.CPU, draft.preempt)
    decodes = [seq for seq in kept if seq.is_decode]
    draft.decode(decodes, Place.CPU)
    for seq in kept:
        if not seq.is_decode:
            draft.prefill(seq, Place.CPU)
    if not draft.preempted:
        reserve = -(-len(decodes) // view.page_size)
        for seq in view.waiting:
            if not draft.admit(seq, Place.CPU, reserve if draft.seqs else 0):
                break
    return draft.build()
