"""Who waits, who runs, and what they hold: the state that plans change."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

import numpy as np

from neo_native import SwapKind
from neo_server.block_manager import BlockManager
from neo_server.columns import Columns
from neo_server.metrics import Metrics
from neo_server.plan import Ints, Place, Plan, Rows, View
from neo_server.request import Sequence, State
from neo_server.step import Step, StepSwap

_BY_ARRIVAL = attrgetter("id")


class Queues:
    """First come, first served; the block manager and the columns follow every change."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.metrics = Metrics()
        self.waiting: list[Sequence] = []  # by arrival
        self.num_waiting_tokens = 0
        self.admitted: list[Sequence] = []  # by the latest plan
        self.running: dict[int, Sequence] = {}
        self._columns = Columns(blocks.slots.total)

    @property
    def has_work(self) -> bool:
        """Some sequence is not finished."""
        return bool(self.waiting or self.running)

    def _queue(self, seq: Sequence) -> None:
        """A sequence that holds no cache waits in its place by arrival."""
        insort(self.waiting, seq, key=_BY_ARRIVAL)
        self.num_waiting_tokens += len(seq.tokens)

    def _end(self, seq: Sequence) -> None:
        """A sequence leaves for good."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
            self.num_waiting_tokens -= len(seq.tokens)
        else:
            del self.running[seq.id]
        self._drop(seq, State.FINISHED)

    def _start_over(self, blocks: BlockManager) -> None:
        """Everybody waits again; ``blocks``: empty caches."""
        for seq in self.running.values():
            seq.last_plan = seq.moved_plan = 0
            self._drop(seq, State.WAITING)
            seq.num_preemptions += 1
            self._queue(seq)
        self.running.clear()
        self.blocks = blocks
        self._columns = Columns(blocks.slots.total)

    def _admit(self, seq_id: int, batches: list[Rows]) -> None:
        at = next(i for i, seq in enumerate(self.waiting) if seq.id == seq_id)
        seq = self.waiting.pop(at)
        self.num_waiting_tokens -= len(seq.tokens)
        self.admitted.append(seq)
        self.blocks.open_slot(seq)
        kind = next(int(b.kind[b.seq == seq_id][0]) for b in batches if seq_id in b.seq)
        seq.state, seq.place = State.RUNNING, Place.of(kind)
        self.running[seq_id] = seq
        self._columns.put(seq)

    def _drop(self, seq: Sequence, state: State) -> None:
        if seq.slot is not None:
            self._columns.drop(seq.slot)
        self.blocks.drop(seq, state)

    def _preempt(self, ids: tuple[int, ...]) -> None:
        for seq_id in ids:
            seq = self.running.pop(seq_id)
            self._drop(seq, State.WAITING)
            seq.num_preemptions += 1
            self.metrics.num_preemptions += 1
            self._queue(seq)

    def _roll_back(self, seq: Sequence, start: int) -> None:
        """A row was void: it is planned again, and whatever builds on it in flight is void too."""
        seq.num_computed, seq.pending, seq.ride = start, 0, 0
        seq.epoch += 1
        self._columns.put(seq)

    def _swap(self, plan: Plan, plan_id: int) -> tuple[StepSwap, ...]:
        swaps = []
        for kind, ids in ((SwapKind.OUT, plan.swap_out), (SwapKind.IN, plan.swap_in)):
            for seq_id in ids:
                seq = self.running[seq_id]
                if kind is SwapKind.OUT:
                    self.blocks.swap_out(seq)
                    self.metrics.num_swap_out_tokens += seq.num_computed
                else:
                    self.blocks.swap_in(seq, plan_id)
                    self.metrics.num_swap_in_tokens += seq.num_computed
                seq.last_plan = seq.moved_plan = plan_id
                seq.skipped = seq.ride = 0
                self._columns.put(seq)
                assert seq.slot is not None
                swaps.append(StepSwap(seq.slot, kind, seq.num_computed))
        self.metrics.num_swap_outs += len(plan.swap_out)
        self.metrics.num_swap_ins += len(plan.swap_in)
        return tuple(swaps)

    def _grow(self, seqs: tuple[Sequence, ...], slot: Ints, kind: Ints) -> None:
        size = np.where(kind % 2 == 1, self.blocks.page_size, self.blocks.block_size)
        for i in self._columns.grown(slot, size).tolist():
            place = Place.CPU if kind[i] % 2 else Place.GPU
            self.blocks.grow(seqs[i], place)
            held = seqs[i].pages if place is Place.CPU else seqs[i].blocks
            self._columns.hold(int(slot[i]), len(held))

    def _note_skipped(self, plan: Plan, view: View, slots: Ints, step: Step) -> None:
        """Counts how long each CPU decode has been left out while workers live."""
        if view.cpu_workers == 0:
            return
        left_out = view.running.is_decode & (view.running.place == Place.CPU)
        changed = view.running.skipped > 0
        if not (left_out.any() or changed.any()):
            return
        has_row = self._columns.mask(step.slot)
        left_out &= ~has_row[slots]
        if plan.preempt:
            left_out &= ~np.isin(view.running.id, plan.preempt)
        changed |= left_out
        counted = np.where(left_out, view.running.skipped + 1, 0)[changed]
        for seq_id, skipped in zip(
            view.running.id[changed].tolist(), counted.tolist(), strict=True
        ):
            seq = self.running.get(seq_id)
            if seq is not None:
                seq.skipped = skipped
        self._columns.note(slots[changed], counted)
        self.metrics.max_skipped = max(self.metrics.max_skipped, int(counted.max(initial=0)))
