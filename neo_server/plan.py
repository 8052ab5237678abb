"""What a policy sees (``View``) and proposes (``Plan``), both frozen.

Sequences and rows are columns (numpy), so that a policy over a thousand of them takes a few dozen
array operations; both can also be read one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from neo_native import RowKind

Ints = npt.NDArray[np.int64]


class Place(IntEnum):
    """Where a sequence's KV cache is."""

    NOWHERE = 0
    GPU = 1
    CPU = 2

    @staticmethod
    def of(kind: int) -> Place:
        """The cache that receives K and V of a row of this kind."""
        return Place.CPU if kind % 2 else Place.GPU


class Mode(StrEnum):
    """How an iteration runs; ``Plan.mode`` and the metrics use these words."""

    GPU_ONLY = "gpu_only"
    ONE_BATCH = "one_batch"  # GPU rows and CPU rows in one pass over the weights ("merged")
    TWO_BATCHES = "two_batches"  # the asymmetric pipeline, arXiv 2411.01142, section 3.1
    PIGGYBACK = "piggyback"  # CPU rows advance by one linear stage; arXiv 2603.12831


class SeqView(NamedTuple):
    """One sequence. Ids grow with arrival, so ordering by id is first come, first served."""

    id: int
    place: Place
    num_tokens: int  # prompt and output so far, tokens still being computed included
    num_computed: int  # of these, in the cache (or put there by a plan in flight)
    held: int  # blocks (on the GPU) or pages (on the CPU) that it holds
    skipped: int = 0  # iterations in a row in which it, a CPU decode, was left out
    ride: int = 0  # linear stages of its next token that are done, when it piggybacks

    @property
    def is_decode(self) -> bool:
        """All but its last token are in the cache."""
        return 0 < self.num_computed == self.num_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens still to compute; at least one."""
        return self.num_tokens - self.num_computed


class Seqs:
    """Columns of ``SeqView``, by arrival."""

    __slots__ = ("held", "id", "num_computed", "num_tokens", "place", "ride", "skipped")

    def __init__(
        self,
        id: Ints,  # noqa: A002
        place: Ints,
        num_tokens: Ints,
        num_computed: Ints,
        held: Ints,
        skipped: Ints,
        ride: Ints,
    ) -> None:
        self.id, self.place = id, place
        self.num_tokens, self.num_computed = num_tokens, num_computed
        self.held, self.skipped, self.ride = held, skipped, ride

    @staticmethod
    def of(views: Iterable[SeqView]) -> Seqs:
        """From single views."""
        columns = list(zip(*views, strict=True)) or [()] * len(SeqView._fields)
        return Seqs(*(np.array(column, np.int64) for column in columns))

    def __len__(self) -> int:
        return len(self.id)

    def __iter__(self) -> Iterator[SeqView]:
        columns = [getattr(self, name).tolist() for name in SeqView._fields]
        for row in zip(*columns, strict=True):
            yield SeqView(row[0], Place(row[1]), *row[2:])

    def __getitem__(self, index: int) -> SeqView:
        values = [int(getattr(self, name)[index]) for name in SeqView._fields]
        return SeqView(values[0], Place(values[1]), *values[2:])

    def take(self, chosen: npt.NDArray[Any] | slice) -> Seqs:
        """Some of them: a mask, indices or a slice."""
        return Seqs(*(getattr(self, name)[chosen] for name in SeqView._fields))

    def plus(self, other: Seqs) -> Seqs:
        """Both, by arrival."""
        if not len(other):
            return self
        if not len(self):
            return other
        order = np.argsort(np.concatenate((self.id, other.id)), kind="stable")
        return Seqs(
            *(
                np.concatenate((getattr(self, name), getattr(other, name)))[order]
                for name in SeqView._fields
            )
        )

    def at(self, place: Place) -> Seqs:
        """Those whose cache is there."""
        return self.take(self.place == place)

    @property
    def is_decode(self) -> npt.NDArray[np.bool_]:
        """Mask of those with all but their last token in the cache."""
        last: npt.NDArray[np.bool_] = self.num_computed == self.num_tokens - 1
        return last & (self.num_computed > 0)

    @property
    def remaining(self) -> Ints:
        """Tokens still to compute."""
        return self.num_tokens - self.num_computed


@dataclass(frozen=True, slots=True)
class View:
    """All that a policy may know. Both queues are in order of arrival.

    ``running`` holds those that can advance; a sequence that only waits for its last token to come
    back is in neither queue, but keeps its seat and its cache.
    """

    waiting: Sequence[SeqView]  # made as they are looked at: read it from its head
    running: Seqs
    gpu_blocks_free: int
    gpu_blocks_total: int
    cpu_pages_free: int
    cpu_pages_total: int
    block_size: int  # tokens
    page_size: int  # tokens
    seats_free: int  # sequences that may be admitted
    max_num_batched_tokens: int
    max_swaps: int
    enable_chunked_prefill: bool
    cpu_workers: int  # alive now
    plan_id: int = 0
    modes: frozenset[Mode] = frozenset((Mode.GPU_ONLY, Mode.ONE_BATCH, Mode.TWO_BATCHES))
    max_skipped: int = 32  # iterations in a row that a CPU decode may be left out
    prefill_share: float = 0.0  # of the latest iterations, how many held a prefill
    prefill_tokens: float = 0.0  # prefill tokens of such an iteration, on average
    cpu_decodes: float = 0.0  # CPU decodes of an iteration lately, on average
    mean_prompt: float = 0.0  # tokens, of the sequences that finished lately; 0: none did
    mean_output: float = 0.0
    tpot_slo_s: float | None = None
    # Riders: a token takes as many plans as there are groups; a group starts with ``ride_capacity``
    # riders at most, one group a plan. 0: none.
    ride_groups: int = 0
    ride_capacity: int = 0
    # Id of the earliest request that waits for its first token and is not late, and the seconds
    # until it is; None: no such request, or no target.
    first_token_due: tuple[int, float] | None = None
    # What a policy leaves for its next plans; the same dictionary in each.
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)

    @overload
    def need(self, seq: SeqView, place: Place) -> int: ...
    @overload
    def need(self, seq: Seqs, place: Place) -> Ints: ...
    def need(self, seq: SeqView | Seqs, place: Place) -> int | Ints:
        """Blocks or pages that ``seq`` has to hold in ``place`` before its next row.

        A prefill takes the room of its whole prompt with its first chunk, so that no prefill
        is ever stuck half-way.
        """
        size = self.block_size if place is Place.GPU else self.page_size
        return -(-seq.num_tokens // size)


class PlanRow(NamedTuple):
    """``n_new`` tokens of one sequence."""

    seq: int
    kind: RowKind
    n_new: int


class Rows:
    """Columns of ``PlanRow``: one sub-batch."""

    __slots__ = ("kind", "n_new", "seq")

    def __init__(self, seq: Ints, kind: Ints, n_new: Ints) -> None:
        self.seq, self.kind, self.n_new = seq, kind, n_new

    @staticmethod
    def of(rows: Iterable[PlanRow]) -> Rows:
        """From single rows."""
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return Rows(*(np.array(column, np.int64) for column in columns))

    def __len__(self) -> int:
        return len(self.seq)

    def in_wire_order(self) -> Rows:
        """By kind, then arrival."""
        order = np.lexsort((self.seq, self.kind))
        return Rows(self.seq[order], self.kind[order], self.n_new[order])

    def __iter__(self) -> Iterator[PlanRow]:
        for seq, kind, n_new in zip(
            self.seq.tolist(), self.kind.tolist(), self.n_new.tolist(), strict=True
        ):
            yield PlanRow(seq, RowKind(kind), n_new)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one iteration does. Preemption (by recompute) and swaps come before the rows."""

    batches: tuple[Rows, ...]  # one or two sub-batches
    swap_out: tuple[int, ...] = ()
    swap_in: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    # CPU decodes that advance by one linear stage; among them all that are on their way.
    riders: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    estimate_s: float | None = None  # how long the cost model says that it takes

    @property
    def num_rows(self) -> int:
        """Rows of both sub-batches, and riders."""
        return sum(len(batch) for batch in self.batches) + len(self.riders)

    @property
    def mode(self) -> Mode:
        """By its shape."""
        if len(self.riders):
            return Mode.PIGGYBACK
        if len(self.batches) == 2:
            return Mode.TWO_BATCHES
        on_cpu = any((batch.kind == RowKind.DECODE_CPU).any() for batch in self.batches)
        return Mode.ONE_BATCH if on_cpu else Mode.GPU_ONLY
