"""No offload, the baseline of arXiv 2411.01142, section 5.

Iteration-level scheduling with selective batching (Orca, OSDI 2022) and chunked prefills beside
decodes (Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from neo_server.plan import Place, Plan, View
from neo_server.policies.draft import Draft


def plan(view: View) -> Plan:
    """First come, first served; out of GPU blocks, the latest arrival is recomputed later."""
    draft = Draft(view)
    kept = draft.grow(view.running, Place.GPU, draft.preempt)
    decodes = [seq for seq in kept if seq.is_decode]
    draft.decode(decodes, Place.GPU)
    for seq in kept:
        if not seq.is_decode:
            draft.prefill(seq, Place.GPU)
    if not draft.preempted:
        reserve = -(-len(decodes) // view.block_size)  # blocks that decodes take per iteration
        for seq in view.waiting:
            if not draft.admit(seq, Place.GPU, reserve if draft.seqs else 0):
                break
    return draft.build()
