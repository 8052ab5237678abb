"""An iteration as it is sent, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from neo_native import RowKind, SwapKind
from neo_server.plan import Ints, Plan
from neo_server.request import Sequence
from neo_server.sampling import TokenLogprobs

UNKNOWN_TOKEN = -1  # in the step ring: what the slot's latest row that samples gives


class StepRow(NamedTuple):
    """A plan's row with all that the gpu worker needs, as it was when it was planned."""

    seq: Sequence
    slot: int
    kind: RowKind
    start: int
    n_new: int
    sample: bool
    epoch: int
    stage: int
    place: int


class StepSwap(NamedTuple):
    """Moves the first ``n_tokens`` of a slot."""

    slot: int
    kind: SwapKind
    n_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One iteration as it is sent; columns over its rows, by sub-batch, then the riders."""

    plan_id: int
    n_rows: tuple[int, int, int]  # of each sub-batch, and riders
    seqs: tuple[Sequence, ...]
    slot: Ints
    kind: Ints
    start: Ints
    n_new: Ints
    sample: Ints
    epoch: Ints
    stage: Ints  # the linear stage at which a rider joins; 0 for other rows
    place: Ints  # of a rider: group x capacity + index in the group
    swaps: tuple[StepSwap, ...]
    plan: Plan

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """All rows in the order in which they are sent and answered."""
        columns = (
            *(self.slot, self.kind, self.start, self.n_new, self.sample, self.epoch),
            *(self.stage, self.place),
        )
        return tuple(
            StepRow(seq, slot, RowKind(kind), start, n_new, bool(sample), *rest)
            for seq, slot, kind, start, n_new, sample, *rest in zip(
                self.seqs, *(column.tolist() for column in columns), strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a plan by stage, sums over layers; pairs are per sub-batch. 0: not measured."""

    linear: tuple[float, float] = (0.0, 0.0)
    gpu_attn: tuple[float, float] = (0.0, 0.0)
    cpu_wait: tuple[float, float] = (0.0, 0.0)
    handoff: float = 0.0
    swap: float = 0.0
    head: float = 0.0
    ride_wait: float = 0.0  # for the attention of riders


class RowLogprobs(NamedTuple):
    """Of one token of a row: the sampled one, or one of the prompt's."""

    row: int
    position: int  # of the token in its sequence
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back; one entry per row, in the order of the step."""

    plan_id: int
    statuses: SequenceOf[int]  # RowStatus
    tokens: SequenceOf[int]  # -1 unless sampled
    elapsed_s: float
    times: StageTimes = StageTimes()
    logprobs: SequenceOf[RowLogprobs] = ()  # of rows that ask for them
