"""NEO's placement in its plain form (arXiv 2411.01142, section 3.2, steps 1 to 4).

Requests go to the CPU when the GPU-cache is full and come back when there is ample room; CPU
decodes overlap with the GPU's work as a second sub-batch. No cost model takes part.
"""

from __future__ import annotations

from neo_server.plan import Place, Plan, SeqView, View
from neo_server.policies.draft import Draft

# A swap-in leaves this share of the GPU-cache free, so that it is not undone at once.
_AMPLE = 0.05


def plan(view: View) -> Plan:
    """GPU decodes and prefills in batch-0, CPU decodes in batch-1 (in batch-0 if it is empty)."""
    draft = Draft(view)
    on_gpu = [seq for seq in view.running if seq.place is Place.GPU]
    on_cpu = [seq for seq in view.running if seq.place is Place.CPU]
    gpu, swapped_out = _keep_or_swap_out(draft, on_gpu, on_cpu)
    if not (swapped_out or draft.preempted):
        returned = _swap_in(draft, on_cpu, gpu)
        on_cpu = [seq for seq in on_cpu if seq not in returned]
        gpu = gpu + returned
    idle_cpu = view.cpu_workers == 0 and bool(gpu)  # wait for a worker while others advance
    cpu = [] if idle_cpu else draft.grow(on_cpu, Place.CPU, draft.preempt) + swapped_out
    gpu_decodes = [seq for seq in gpu if seq.is_decode]
    cpu_decodes = [seq for seq in cpu if seq.is_decode]
    draft.decode(gpu_decodes, Place.GPU)
    draft.tokens_left -= len(cpu_decodes)
    _prefill(draft, gpu, cpu, len(gpu_decodes), len(cpu_decodes))
    draft.tokens_left += len(cpu_decodes)
    draft.decode(cpu_decodes, Place.CPU, batch=1 if draft.has_gpu_work else 0)
    return draft.build()


def _keep_or_swap_out(
    draft: Draft, on_gpu: list[SeqView], on_cpu: list[SeqView]
) -> tuple[list[SeqView], list[SeqView]]:
    """Step 2: while the GPU-cache would overflow, its latest arrivals go to the CPU."""
    growth = sum(draft.view.need(seq, Place.CPU) - seq.held for seq in on_cpu)
    swapped_out: list[SeqView] = []

    def evict(seq: SeqView) -> None:
        if draft.view.cpu_workers > 0 and draft.try_swap(seq, Place.CPU, reserve=growth):
            swapped_out.append(seq)
        else:
            draft.preempt(seq)

    return draft.grow(on_gpu, Place.GPU, evict), swapped_out


def _swap_in(draft: Draft, on_cpu: list[SeqView], gpu: list[SeqView]) -> list[SeqView]:
    """Step 2: while there is ample room, the earliest CPU-requests come back."""
    ample = int(_AMPLE * draft.view.gpu_blocks_total) + 1
    returned: list[SeqView] = []
    for seq in on_cpu:
        occupants = len(gpu) + len(returned)
        if not draft.try_swap(seq, Place.GPU, reserve=ample + occupants if occupants else 0):
            break
        returned.append(seq)
    return returned


def _prefill(
    draft: Draft, gpu: list[SeqView], cpu: list[SeqView], gpu_decodes: int, cpu_decodes: int
) -> None:
    """Step 3: prefills join batch-0; their KV stays on the GPU if it fits, else goes to the CPU."""
    view = draft.view
    started = [(seq, Place.GPU) for seq in gpu] + [(seq, Place.CPU) for seq in cpu]
    for seq, place in sorted(started):
        if not seq.is_decode:
            draft.prefill(seq, place)
    if draft.preempted or draft.swap_out:
        return
    for seq in view.waiting:
        gpu_reserve = -(-gpu_decodes // view.block_size) if draft.seqs else 0
        if draft.admit(seq, Place.GPU, gpu_reserve):
            continue
        never_on_gpu = view.need(seq, Place.GPU) > view.gpu_blocks_total
        cpu_reserve = -(-cpu_decodes // view.page_size) if draft.seqs else 0
        if not (view.cpu_workers or never_on_gpu) or not draft.admit(seq, Place.CPU, cpu_reserve):
            break
