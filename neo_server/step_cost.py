"""What a step puts on each stage, from its rows: for the simulator's clock and for corrections."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from neo_native import RowKind
from neo_server.cost_model import (
    NO_RIDE,
    CostModel,
    Load,
    Ride,
    Stages,
    iteration_time,
    joined,
    ride_handoffs,
)
from neo_server.step import Step


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Sums of each sub-batch, and of the riders."""

    batches: tuple[Load, ...]
    ride: Ride = NO_RIDE
    swaps: bool = False  # between the caches, beside or before it

    def seconds(self, cost: CostModel) -> float:
        """How long ``cost`` says that it takes."""
        return iteration_time(cost, self.batches, self.ride)

    def stages(self, cost: CostModel) -> list[Stages]:
        """Of each sub-batch; the riders' linear work and hand-off are the first one's."""
        if not self.ride.riders:
            return [Stages.of(cost, load) for load in self.batches]
        first, *others = [Stages.of(cost, b) for b in joined(cost, self.batches, self.ride)]
        handoff = ride_handoffs(cost, self.ride) / cost.num_layers
        return [replace(first, handoff=first.handoff + handoff), *others]

    @property
    def sampled(self) -> float:
        """Rows that get a token."""
        return sum(load.sampled for load in self.batches) + self.ride.sampled

    def busy(self, cost: CostModel) -> tuple[float, float]:
        """Seconds that the GPU and the CPU work."""
        stages = self.stages(cost)
        gpu = cost.num_layers * sum(s.linear + s.gpu_attn for s in stages)
        cpu = cost.num_layers * sum(s.cpu_attn for s in stages)
        if self.ride.cpu_rows:
            cpu += cost.ride_attn(self.ride.cpu_rows, self.ride.cpu_tokens)
        return gpu, cpu


def load_of_step(step: Step, *, swaps: bool = True) -> StepLoad:
    """From the rows, as they were planned. ``swaps``: with those of the plan."""
    first, second, riders = step.n_rows
    loads = [_load(step, slice(0, first))]
    if second:
        loads.append(_load(step, slice(first, first + second)))
    if swaps and step.swaps:
        named = set(step.slot.tolist())
        for swap in step.swaps:
            if swap.slot in named:
                loads[0].awaited += swap.n_tokens
            else:
                loads[0].moved += swap.n_tokens
    ride = _ride(step, slice(first + second, None)) if riders else NO_RIDE
    return StepLoad(tuple(loads), ride, swaps and len(step.swaps) > 0)


def _ride(step: Step, part: slice) -> Ride:
    sample = step.sample[part]
    attends = sample == 0  # K and V of all before the token, and its own
    rows = int(attends.sum())
    tokens = int(step.start[part][attends].sum()) + rows
    groups = len(np.unique(step.stage[part][attends]))  # no two have the same
    return Ride(len(sample), groups, rows, tokens, int(sample.sum()))


def _load(step: Step, part: slice) -> Load:
    kind, start, n_new = step.kind[part], step.start[part], step.n_new[part]
    sample = step.sample[part]
    on_gpu, on_cpu = kind == RowKind.DECODE_GPU, kind == RowKind.DECODE_CPU
    prefill = ~(on_gpu | on_cpu)
    pairs, stored, staged = 0.0, 0, 0
    if prefill.any():
        new, to_cpu = n_new[prefill], kind == RowKind.PREFILL_CPU
        pairs = float((new * (start[prefill] + (new + 1) / 2)).sum())
        stored, staged = int(n_new[to_cpu].sum()), int(start[to_cpu].sum())
    return Load(
        tokens=int(n_new.sum()),
        pairs=pairs,
        gpu_rows=int(on_gpu.sum()),
        gpu_tokens=int(start[on_gpu].sum() + on_gpu.sum()),
        cpu_rows=int(on_cpu.sum()),
        cpu_tokens=int(start[on_cpu].sum() + on_cpu.sum()),
        moved=stored,
        sampled=int(sample.sum()),
        staged=staged,
        stored=stored,
    )
