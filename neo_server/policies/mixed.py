"""Every other request on the CPU, whatever the load.

No policy of the paper, but the one that runs every kind of row, for tests and for measuring.
"""

from __future__ import annotations

from neo_server.cost_model import CostModel
from neo_server.plan import Place, Plan, Seqs, View
from neo_server.policies.draft import Draft


def plan(view: View, cost: CostModel) -> Plan:
    """Even ids on the GPU (batch-0), odd ones on the CPU (decodes in batch-1)."""
    draft = Draft(view)
    cpu_decodes = plan_places(draft)
    draft.decode(cpu_decodes, Place.CPU, batch=1 if draft.has_gpu_work else 0)
    return draft.build()


def plan_places(draft: Draft) -> Seqs:
    """All but the CPU decodes, for which room and budget are set aside; the caller places them."""
    view = draft.view
    gpu = draft.grow(view.running.at(Place.GPU), Place.GPU, draft.preempt)
    cpu = draft.grow(view.running.at(Place.CPU), Place.CPU, draft.preempt)
    gpu_decodes, cpu_decodes = gpu.take(gpu.is_decode), cpu.take(cpu.is_decode)
    draft.decode(gpu_decodes, Place.GPU)
    draft.tokens_left -= len(cpu_decodes)
    for seq in gpu.take(~gpu.is_decode).plus(cpu.take(~cpu.is_decode)):
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
    return cpu_decodes
