"""A plan in the making: what policies share. Lives only inside one call of a policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from neo_native import RowKind
from neo_server.cost_model import Load
from neo_server.plan import Ints, Place, Plan, Rows, Seqs, SeqView, View

_KINDS = {
    (Place.GPU, False): RowKind.PREFILL_GPU,
    (Place.CPU, False): RowKind.PREFILL_CPU,
    (Place.GPU, True): RowKind.DECODE_GPU,
    (Place.CPU, True): RowKind.DECODE_CPU,
}


class Draft:
    """Keeps account of what a plan has spent so far."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.free = {Place.GPU: view.gpu_blocks_free, Place.CPU: view.cpu_pages_free}
        self.tokens_left = view.max_num_batched_tokens
        self.seats_left = view.seats_free
        self.swaps_left = view.max_swaps
        self.seats = view.seats_free + len(view.running)
        self.swap_out: list[int] = []
        self.swap_in: list[int] = []
        self.preempted: list[int] = []
        self._batches: tuple[list[Rows], list[Rows]] = ([], [])

    def grow(self, seqs: Seqs, place: Place, evict: Callable[[SeqView], None]) -> Seqs:
        """Takes the room that ``seqs`` (of one place, by arrival) need for their next row.

        While it is short the latest arrivals are given to ``evict``, so the earliest always
        goes on. Returns those that stay.
        """
        growth = np.maximum(self.view.need(seqs, place) - seqs.held, 0)
        total, kept = int(growth.sum()), len(seqs)
        while total > self.free[place]:
            kept -= 1
            total -= int(growth[kept])
            evict(seqs[kept])
        self.free[place] -= total
        return seqs.take(slice(kept))

    def preempt(self, seq: SeqView) -> None:
        """Drops the sequence's cache; it is prefilled again later."""
        self.preempted.append(seq.id)
        self.free[seq.place] += seq.held
        self.seats_left += 1

    def try_swap(self, seq: SeqView, to: Place, reserve: int = 0) -> bool:
        """Moves the sequence if ``to`` has room for it and ``reserve`` more."""
        need = self.view.need(seq, to)
        if self.swaps_left == 0 or need + reserve > self.free[to]:
            return False
        self.swaps_left -= 1
        self.free[to] -= need
        if to is Place.CPU:
            self.swap_out.append(seq.id)
            self.free[Place.GPU] += seq.held
        else:  # swaps out come first, so its pages are free only after this plan
            self.swap_in.append(seq.id)
        return True

    def decode(self, seqs: Seqs, place: Place, batch: int = 0) -> None:
        """One token of each."""
        if len(seqs):
            count = len(seqs)
            kind = np.full(count, int(_KINDS[place, True]), np.int64)
            self._batches[batch].append(Rows(seqs.id, kind, np.ones(count, np.int64)))
            self.tokens_left -= count

    def prefill(self, seq: SeqView, place: Place, limit: int | None = None) -> int:
        """Puts the next chunk of a sequence whose room is taken into batch-0; its tokens."""
        n_new = self.chunk(seq, limit)
        if n_new:
            row = one_row(seq.id, _KINDS[place, False], n_new)
            self._batches[0].append(row)
            self.tokens_left -= n_new
        return n_new

    def chunk(self, seq: SeqView, limit: int | None = None) -> int:
        """Tokens of the next chunk under what is left of the budget (and ``limit``); 0 if none."""
        left = self.tokens_left if limit is None else min(self.tokens_left, limit)
        if self.view.enable_chunked_prefill:
            return max(min(seq.remaining, left), 0)
        return seq.remaining if seq.remaining <= self.tokens_left else 0

    def can_admit(self, seq: SeqView, place: Place, reserve: int) -> bool:
        """There is room and a seat for a waiting sequence."""
        need = self.view.need(seq, place)
        return self.seats_left > 0 and need + reserve <= self.free[place]

    def admit(self, seq: SeqView, place: Place, reserve: int, limit: int | None = None) -> int:
        """Starts the prefill of a waiting sequence if there is room, budget and a seat for it."""
        if not self.can_admit(seq, place, reserve):
            return 0
        n_new = self.prefill(seq, place, limit)
        if n_new:
            self.free[place] -= self.view.need(seq, place)
            self.seats_left -= 1
        return n_new

    @property
    def has_gpu_work(self) -> bool:
        """Batch-0 is not empty."""
        return bool(self._batches[0])

    def build(self, riders: Ints | None = None, estimate_s: float | None = None) -> Plan:
        """The plan."""
        batches = [_joined(batch) for batch in self._batches if batch]
        return Plan(
            tuple(batches),
            tuple(self.swap_out),
            tuple(self.swap_in),
            tuple(self.preempted),
            np.empty(0, np.int64) if riders is None else riders,
            estimate_s,
        )


def one_row(seq: int, kind: RowKind, n_new: int) -> Rows:
    """One row."""
    return Rows(*(np.array([value], np.int64) for value in (seq, kind, n_new)))


def _joined(batch: list[Rows]) -> Rows:
    if len(batch) == 1:
        return batch[0]
    return Rows(
        np.concatenate([rows.seq for rows in batch]),
        np.concatenate([rows.kind for rows in batch]),
        np.concatenate([rows.n_new for rows in batch]),
    )


def decode_load(seqs: Seqs, place: Place) -> Load:
    """What decodes of ``seqs`` add to a sub-batch."""
    count, tokens = len(seqs), int(seqs.num_tokens.sum())
    load = Load(tokens=count, sampled=count)
    if place is Place.GPU:
        load.gpu_rows, load.gpu_tokens = count, tokens
    else:
        load.cpu_rows, load.cpu_tokens = count, tokens
    return load
