"""What a policy sees (``View``) and proposes (``Plan``), both frozen, and their check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from neo_server.errors import PlanError


class Place(IntEnum):
    """Where a sequence's KV cache is."""

    NOWHERE = 0
    GPU = 1
    CPU = 2


class RowKind(IntEnum):
    """``RowKind`` of protos/wire.hpp."""

    PREFILL_GPU = 0
    PREFILL_CPU = 1
    DECODE_GPU = 2
    DECODE_CPU = 3

    def __init__(self, value: int) -> None:
        self.is_decode = value >= 2  # one token whose predecessors are all in the cache
        self.place = Place.CPU if value % 2 else Place.GPU  # of the cache that receives K and V


class RowStatus(IntEnum):
    """``RowStatus`` of protos/wire.hpp."""

    COMPUTED = 0
    SAMPLED = 1
    VOIDED = 2


class SwapKind(IntEnum):
    """``SwapKind`` of protos/wire.hpp."""

    OUT = 0
    IN = 1


class SeqView(NamedTuple):
    """One sequence. Ids grow with arrival, so ordering by id is first come, first served."""

    id: int
    place: Place
    num_tokens: int  # prompt and output so far
    num_computed: int  # of these, in the cache
    held: int  # blocks (on the GPU) or pages (on the CPU) that it holds

    @property
    def is_decode(self) -> bool:
        """All but its last token are in the cache."""
        return 0 < self.num_computed == self.num_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens still to compute; at least one."""
        return self.num_tokens - self.num_computed


@dataclass(frozen=True, slots=True)
class View:
    """All that a policy may know. Both queues are in order of arrival."""

    waiting: tuple[SeqView, ...]
    running: tuple[SeqView, ...]
    gpu_blocks_free: int
    gpu_blocks_total: int
    cpu_pages_free: int
    cpu_pages_total: int
    block_size: int  # tokens
    page_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    max_swaps: int
    enable_chunked_prefill: bool
    cpu_workers: int  # alive now

    def need(self, seq: SeqView, place: Place) -> int:
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What one iteration does. Preemption (by recompute) and swaps come before the rows."""

    batches: tuple[tuple[PlanRow, ...], ...]  # one or two sub-batches
    swap_out: tuple[int, ...] = ()
    swap_in: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of both sub-batches."""
        return sum(len(batch) for batch in self.batches)


def check_plan(plan: Plan, view: View) -> None:
    """Raises ``PlanError`` unless ``plan`` can be carried out as it stands."""
    running = {seq.id: seq for seq in view.running}
    waiting = {seq.id: seq for seq in view.waiting}
    _check_moves(plan, running, view)
    rows = [row for batch in plan.batches for row in batch]
    if len(plan.batches) > 2 or (len(plan.batches) == 2 and not all(plan.batches)):
        raise PlanError(f"sub-batches have {[len(b) for b in plan.batches]} rows; 2 filled at most")
    if len({row.seq for row in rows}) != len(rows):
        raise PlanError("a sequence has two rows in one plan")
    moved = dict.fromkeys(plan.swap_out, Place.CPU) | dict.fromkeys(plan.swap_in, Place.GPU)
    for row in rows:
        seq = running.get(row.seq) or waiting.get(row.seq)
        if seq is None or row.seq in plan.preempt:
            raise PlanError(f"row names sequence {row.seq}, which is unknown or preempted")
        _check_row(row, seq, moved.get(row.seq, seq.place), view)
    _check_budgets(plan, rows, running, waiting, view)


def _check_moves(plan: Plan, running: Mapping[int, SeqView], view: View) -> None:
    for name, ids, place in (
        ("preempt", plan.preempt, None),
        ("swap_out", plan.swap_out, Place.GPU),
        ("swap_in", plan.swap_in, Place.CPU),
    ):
        for seq_id in ids:
            seq = running.get(seq_id)
            if seq is None or (place is not None and seq.place is not place):
                raise PlanError(f"{name} names sequence {seq_id}, which is not running there")
    moves = plan.preempt + plan.swap_out + plan.swap_in
    if len(set(moves)) != len(moves):
        raise PlanError("a sequence is moved twice in one plan")
    if len(plan.swap_out) + len(plan.swap_in) > view.max_swaps:
        raise PlanError(f"more than max_swaps, {view.max_swaps}, swaps")


def _check_row(row: PlanRow, seq: SeqView, place: Place, view: View) -> None:
    if place is not Place.NOWHERE and row.kind.place is not place:
        raise PlanError(f"{row.kind.name} row for sequence {seq.id}, whose cache is {place.name}")
    if row.kind.is_decode != seq.is_decode:
        raise PlanError(f"{row.kind.name} row for sequence {seq.id}: {seq}")
    whole = row.n_new == seq.remaining
    if not 1 <= row.n_new <= seq.remaining or not (whole or view.enable_chunked_prefill):
        raise PlanError(f"row of {row.n_new} tokens; sequence {seq.id} has {seq.remaining} left")


def _check_budgets(
    plan: Plan,
    rows: list[PlanRow],
    running: Mapping[int, SeqView],
    waiting: Mapping[int, SeqView],
    view: View,
) -> None:
    admitted = sum(row.seq in waiting for row in rows)
    seqs = len(running) - len(plan.preempt) + admitted
    limits = [
        ("tokens", sum(row.n_new for row in rows), view.max_num_batched_tokens),
        ("sequences", seqs, view.max_num_seqs),
    ]
    spent = {Place.GPU: 0, Place.CPU: 0}
    moved = set(plan.swap_out + plan.swap_in)
    for row in rows:
        if row.seq not in moved:
            seq = running.get(row.seq) or waiting[row.seq]
            place = row.kind.place
            spent[place] += view.need(seq, place) - seq.held
    for seq_id in plan.swap_out:
        spent[Place.CPU] += view.need(running[seq_id], Place.CPU)
        spent[Place.GPU] -= running[seq_id].held
    for seq_id in plan.swap_in:  # its pages are free only after the plan: swaps out come first
        spent[Place.GPU] += view.need(running[seq_id], Place.GPU)
    for seq_id in plan.preempt:
        spent[running[seq_id].place] -= running[seq_id].held
    limits += [
        ("GPU blocks", spent[Place.GPU], view.gpu_blocks_free),
        ("CPU pages", spent[Place.CPU], view.cpu_pages_free),
    ]
    for name, value, limit in limits:
        if value > limit:
            raise PlanError(f"plan takes {value} {name}; there is room for {limit}")
