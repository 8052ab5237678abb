"""Every other request on the CPU, whatever the load.

No policy of the paper, but the one that runs every kind of row, for tests and for measuring.
"""

from __future__ import annotations

from neo_server.plan import Place, Plan, View
from neo_server.policies.draft import Draft


def plan(view: View) -> Plan:
    """Even ids on the GPU (batch-0), odd ones on the CPU (decodes in batch-1)."""
    draft = Draft(view)
    gpu = [seq for seq in view.running if seq.place is Place.GPU]
    cpu = [seq for seq in view.running if seq.place is Place.CPU]
    gpu = draft.grow(gpu, Place.GPU, draft.preempt)
    cpu = draft.grow(cpu, Place.CPU, draft.preempt)
    cpu_decodes = [seq for seq in cpu if seq.is_decode]
    draft.decode([seq for seq in gpu if seq.is_decode], Place.GPU)
    draft.tokens_left -= len(cpu_decodes)
    for seq in sorted(gpu + cpu):
        if not seq.is_decode:
            draft.prefill(seq, seq.place)
    if not draft.preempted:
        for seq in view.waiting:
            first, second = (Place.CPU, Place.GPU) if seq.id % 2 else (Place.GPU, Place.CPU)
            if draft.admit(seq, first, 0):
                continue
            total = view.cpu_pages_total if first is Place.CPU else view.gpu_blocks_total
            if view.need(seq, first) <= total or not draft.admit(seq, second, 0):
                break
    draft.tokens_left += len(cpu_decodes)
    draft.decode(cpu_decodes, Place.CPU, batch=1 if draft.has_gpu_work else 0)
    return draft.build()
