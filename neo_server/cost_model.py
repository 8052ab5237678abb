"""What an iteration costs: per-stage times, and how the stages of a plan overlap.

Symbols as in arXiv 2411.01142, section 3.2: T_l (linear stage), T_ga and T_ca (attention on the
GPU and on the CPU). A policy asks for times of aggregates (``Load``), never of single rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """Seconds, per layer where not said otherwise."""

    @property
    def num_layers(self) -> int:
        """Of the model."""

    @property
    def overlaps_transfers(self) -> bool:
        """Moves between the caches run beside computation (CUDA), not between (CPU)."""

    @property
    def ride_places(self) -> float:
        """That every linear stage has where some ride, taken or not; 0: as many as ride."""

    def linear(self, tokens: float) -> float:
        """T_l: pre- and post-projection of ``tokens``."""

    def prefill_attn(self, pairs: float) -> float:
        """Prefill attention of that many query-key pairs."""

    def gpu_attn(self, rows: float, tokens: float) -> float:
        """Decode attention on the GPU over ``tokens`` of K and V in all."""

    def cpu_attn(self, rows: float, tokens: float) -> float:
        """T_ca: the same by the cpu workers; infinite without any."""

    def ride_attn(self, rows: float, tokens: float) -> float:
        """T_ca of riders in one layer each, whose jobs lie beside one another in the queue."""

    def handoff(self, rows: float) -> float:
        """Storing K and V, publishing Q and collecting O of one sub-batch's CPU rows."""

    def ride_handoff(self, rows: float) -> float:
        """The same of a group of riders at one stage, as far as the GPU's work is longer for it.

        No rows: of an empty group, in a plan where others ride.
        """

    def transfer(self, tokens: float) -> float:
        """Moving K and V of ``tokens`` between the caches."""

    def staging(self, tokens: float) -> float:
        """By how much a layer is longer for ``tokens`` that it fetches from the CPU-cache.

        Those before a later chunk of a prefill there, which attends over them.
        """

    def storing(self, tokens: float) -> float:
        """By how much a layer is longer for K and V of ``tokens`` that go to the CPU-cache.

        Those of prefills there, as far as they are not ``transfer``'s: 0 where a copy moves them.
        """

    def head(self, sampled: float) -> float:
        """Once per iteration: embedding, logits, sampling, and all that is fixed."""


@dataclass(slots=True)
class Load:
    """One sub-batch in sums."""

    tokens: float = 0  # through the linear stage
    pairs: float = 0.0  # query-key pairs of prefills
    gpu_rows: float = 0
    gpu_tokens: float = 0  # K and V that GPU decodes read
    cpu_rows: float = 0
    cpu_tokens: float = 0
    moved: float = 0  # tokens between the caches: CPU-bound prefills, and swaps beside it
    sampled: float = 0
    awaited: float = 0  # tokens of swaps that have to be through before it begins
    staged: float = 0  # tokens before its later chunks of prefills on the CPU
    stored: float = 0  # tokens of its prefills on the CPU

    def with_cpu(self, rows: float, tokens: float) -> Load:
        """With that many CPU decodes more."""
        return Load(
            *(self.tokens + rows, self.pairs, self.gpu_rows, self.gpu_tokens),
            *(self.cpu_rows + rows, self.cpu_tokens + tokens, self.moved, self.sampled + rows),
            *(self.awaited, self.staged, self.stored),
        )

    def with_prefill(self, n_new: int, start: int, *, moved: bool, last: bool) -> Load:
        """With a chunk more. ``moved``: of a prefill on the CPU."""
        return Load(
            *(self.tokens + n_new, self.pairs + pairs_of(n_new, start)),
            *(self.gpu_rows, self.gpu_tokens, self.cpu_rows, self.cpu_tokens),
            *(self.moved + (n_new if moved else 0), self.sampled + last, self.awaited),
            *(self.staged + (start if moved else 0), self.stored + (n_new if moved else 0)),
        )

    def with_riders(self, tokens: float, sampled: float) -> Load:
        """With riders' rows in every linear stage, on average, and those of the last one."""
        return Load(
            *(self.tokens + tokens, self.pairs, self.gpu_rows, self.gpu_tokens),
            *(self.cpu_rows, self.cpu_tokens, self.moved, self.sampled + sampled, self.awaited),
            *(self.staged, self.stored),
        )


@dataclass(frozen=True, slots=True)
class Ride:
    """The riders of an iteration in sums.

    Each passes one of the layers + 1 linear stages, all but the last of which have attention behind
    them. That has a whole iteration, so it costs only when the CPU needs longer.
    """

    riders: float = 0
    groups: float = 0  # with attention: each has a hand-off of its own
    cpu_rows: float = 0  # with attention
    cpu_tokens: float = 0
    sampled: float = 0

    @staticmethod
    def spread(riders: float, tokens: float, groups: int, capacity: int) -> Ride:
        """Riders with ``tokens`` of K and V in full groups, as many at every stage."""
        used = min(-(-riders // max(capacity, 1)), groups - 1)
        return Ride(riders, used, riders, tokens, riders / groups)


NO_RIDE = Ride()


def ride_handoffs(cost: CostModel, ride: Ride) -> float:
    """Seconds that the riders' hand-offs add to an iteration."""
    if not ride.riders:
        return 0.0
    empty = max(cost.num_layers - ride.groups, 0.0) * cost.ride_handoff(0)
    if not ride.groups:
        return empty
    return empty + ride.groups * cost.ride_handoff(ride.cpu_rows / ride.groups)


def pairs_of(n_new: float, start: float) -> float:
    """Query-key pairs of a causal chunk."""
    return n_new * (start + (n_new + 1) / 2)


@dataclass(slots=True)  # not frozen: a plan makes a hundred, and freezing doubles the time
class Stages:
    """Per-layer times of one sub-batch."""

    linear: float
    gpu_attn: float  # with what it waits for earlier chunks from the CPU-cache
    cpu_attn: float
    handoff: float  # with what prefills store in the CPU-cache

    @staticmethod
    def of(cost: CostModel, load: Load) -> Stages:
        """T_l, T_ga, T_ca and the hand-off of ``load``."""
        gpu_attn = cost.prefill_attn(load.pairs) if load.pairs else 0.0
        if load.gpu_rows:
            gpu_attn += cost.gpu_attn(load.gpu_rows, load.gpu_tokens)
        if load.staged:
            gpu_attn += cost.staging(load.staged)
        handoff = cost.handoff(load.cpu_rows) if load.cpu_rows else 0.0
        if load.stored:
            handoff += cost.storing(load.stored)
        return Stages(
            cost.linear(load.tokens) if load.tokens else 0.0,
            gpu_attn,
            cost.cpu_attn(load.cpu_rows, load.cpu_tokens) if load.cpu_rows else 0.0,
            handoff,
        )


def layer_time(batches: Sequence[Stages]) -> float:
    """One layer of one or two sub-batches, in the order that the executor runs.

    One batch: the CPU's attention overlaps only the GPU's. Two: a cycle of linear 0, publish 0,
    attention 0, wait 1, linear 1, publish 1, attention 1, wait 0, bound by the GPU's sum, by each
    sub-batch's own chain, or by the CPU. (The paper's formula has a barrier between the two
    halves: max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0), which is never less.)
    """
    if len(batches) == 1:
        (one,) = batches
        return one.linear + one.handoff + max(one.gpu_attn, one.cpu_attn)
    first, second = batches
    gpu = sum(b.linear + b.gpu_attn + b.handoff for b in batches)
    chains = (b.linear + b.handoff + b.cpu_attn for b in batches)
    return max(gpu, *chains, first.cpu_attn + second.cpu_attn)


def iteration_time(cost: CostModel, loads: Sequence[Load], ride: Ride = NO_RIDE) -> float:
    """Seconds of one iteration of one or two sub-batches and riders."""
    layers = cost.num_layers
    seconds = 0.0
    if ride.riders:
        loads = joined(cost, loads, ride)
    if loads:
        seconds = layers * layer_time([Stages.of(cost, load) for load in loads])
    seconds += ride_handoffs(cost, ride)
    moved = awaited = sampled = 0.0
    for load in loads:
        moved, awaited, sampled = moved + load.moved, awaited + load.awaited, sampled + load.sampled
    if moved:
        transfer = layers * cost.transfer(moved)
        seconds = max(seconds, transfer) if cost.overlaps_transfers else seconds + transfer
    if awaited:
        seconds += layers * cost.transfer(awaited)
    seconds += cost.head(sampled)
    return max(seconds, cost.ride_attn(ride.cpu_rows, ride.cpu_tokens)) if ride.groups else seconds


def joined(cost: CostModel, loads: Sequence[Load], ride: Ride) -> list[Load]:
    """``loads`` with the riders' linear work in equal parts in every stage of the first."""
    first, *others = list(loads) or [Load()]
    tokens = max(ride.riders / (cost.num_layers + 1), cost.ride_places)
    return [first.with_riders(tokens, ride.sampled), *others]


class FreeCost:
    """Everything costs the same little: for policies that ask nothing, and for tests."""

    overlaps_transfers = True
    ride_places = 0.0

    def __init__(
        self,
        handoff_s: float = 0.0,
        cpu_s_per_token: float = 1e-9,
        num_layers: int = 1,
        moved_s_per_token: float = 1e-12,
    ) -> None:
        self.num_layers = num_layers
        self._handoff_s = handoff_s
        self._cpu_s_per_token = cpu_s_per_token
        self._moved_s_per_token = moved_s_per_token

    def linear(self, tokens: float) -> float:
        """Weights are all that counts."""
        return 1e-3 + 1e-9 * tokens

    def prefill_attn(self, pairs: float) -> float:
        """Nothing to speak of."""
        return 1e-12 * pairs

    def gpu_attn(self, rows: float, tokens: float) -> float:
        """Nothing to speak of."""
        return 1e-9 * rows

    def cpu_attn(self, rows: float, tokens: float) -> float:
        """In proportion to the tokens."""
        return self._cpu_s_per_token * tokens

    def ride_attn(self, rows: float, tokens: float) -> float:
        """The same."""
        return self.cpu_attn(rows, tokens)

    def handoff(self, rows: float) -> float:
        """What the constructor was given."""
        return self._handoff_s

    def ride_handoff(self, rows: float) -> float:
        """The same."""
        return self._handoff_s if rows else 0.0

    def transfer(self, tokens: float) -> float:
        """In proportion to the tokens."""
        return self._moved_s_per_token * tokens

    def staging(self, tokens: float) -> float:
        """As any copy."""
        return self.transfer(tokens)

    def storing(self, tokens: float) -> float:
        """Copies move it."""
        return 0.0

    def head(self, sampled: float) -> float:
        """Fixed."""
        return 1e-6
