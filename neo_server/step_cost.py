"""What a step puts on each stage, from its rows: for the simulator's clock and for corrections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from neo_native import RowKind
from neo_server.cost_model import CostModel, Load, Stages, iteration_time
from neo_server.request import Sequence
from neo_server.step import Step


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Sums of each sub-batch, and of the riders."""

    batches: tuple[Load, ...]
    ride: Load

    def seconds(self, cost: CostModel) -> float:
        """How long ``cost`` says that it takes."""
        return iteration_time(cost, self.batches, self.ride)

    def busy(self, cost: CostModel) -> tuple[float, float]:
        """Seconds that the GPU and the CPU work."""
        stages = [Stages.of(cost, load) for load in self.batches]
        gpu = cost.num_layers * sum(s.linear + s.gpu_attn for s in stages)
        cpu = cost.num_layers * sum(s.cpu_attn for s in stages)
        if self.ride.cpu_rows:
            cpu += cost.cpu_attn(self.ride.cpu_rows, self.ride.cpu_tokens)
        return gpu, cpu


def load_of_step(step: Step, running: Mapping[int, Sequence]) -> StepLoad:
    """``running``: the scheduler's, right after it made the step."""
    riders = step.plan.riders.tolist()
    ride = Load(cpu_rows=len(riders), cpu_tokens=sum(running[i].num_planned for i in riders))
    loads = []
    low = 0
    for count in step.n_rows:
        loads.append(_load(step, slice(low, low + count), set(riders)))
        low += count
    if not loads:
        loads = [Load()]
    loads[0].moved += sum(swap.n_tokens for swap in step.swaps)
    return StepLoad(tuple(loads), ride)


def _load(step: Step, part: slice, riders: set[int]) -> Load:
    kind, start, n_new = step.kind[part], step.start[part], step.n_new[part]
    sample = step.sample[part]
    if riders:  # the rows of those that arrive are not decodes of this pass
        stay = np.array([seq.id not in riders for seq in step.seqs[part]], bool)
        kind, start, n_new, sample = kind[stay], start[stay], n_new[stay], sample[stay]
    on_gpu, on_cpu = kind == RowKind.DECODE_GPU, kind == RowKind.DECODE_CPU
    prefill = ~(on_gpu | on_cpu)
    pairs = 0.0
    if prefill.any():
        new = n_new[prefill]
        pairs = float((new * (start[prefill] + (new + 1) / 2)).sum())
    return Load(
        tokens=int(n_new.sum()),
        pairs=pairs,
        gpu_rows=int(on_gpu.sum()),
        gpu_tokens=int(start[on_gpu].sum() + on_gpu.sum()),
        cpu_rows=int(on_cpu.sum()),
        cpu_tokens=int(start[on_cpu].sum() + on_cpu.sum()),
        moved=int(n_new[kind == RowKind.PREFILL_CPU].sum()),
        sampled=int(sample.sum()),
    )
