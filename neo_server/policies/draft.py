"""A plan in the making: what policies share. Lives only inside one call of a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neo_server.plan import Place, Plan, PlanRow, RowKind, SeqView, View

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
        self.seqs = len(view.running)
        self.swaps_left = view.max_swaps
        self.swap_out: list[int] = []
        self.swap_in: list[int] = []
        self.preempted: list[int] = []
        self._batches: tuple[list[PlanRow], list[PlanRow]] = ([], [])

    def grow(
        self, seqs: Sequence[SeqView], place: Place, evict: Callable[[SeqView], None]
    ) -> list[SeqView]:
        """Takes the room that ``seqs`` (of one place, by arrival) need for their next row.

        While it is short the latest arrivals are given to ``evict``, so the earliest always
        goes on. Returns those that stay.
        """
        alive = list(seqs)
        kept: list[SeqView] = []
        while len(kept) < len(alive):
            seq = alive[len(kept)]
            growth = self.view.need(seq, place) - seq.held
            if growth <= self.free[place]:
                self.free[place] -= growth
                kept.append(seq)
            else:
                evict(alive.pop())
        return kept

    def preempt(self, seq: SeqView) -> None:
        """Drops the sequence's cache; it is prefilled again later."""
        self.preempted.append(seq.id)
        self.free[seq.place] += seq.held
        self.seqs -= 1

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

    def decode(self, seqs: Sequence[SeqView], place: Place, batch: int = 0) -> None:
        """One token of each; the budget is never below max_num_seqs tokens."""
        kind = _KINDS[place, True]
        self._batches[batch].extend(PlanRow(seq.id, kind, 1) for seq in seqs)
        self.tokens_left -= len(seqs)

    def prefill(self, seq: SeqView, place: Place, batch: int = 0) -> bool:
        """The next chunk of a sequence whose room is taken already; False: no budget for it."""
        n_new = self.chunk(seq)
        if n_new == 0:
            return False
        self._batches[batch].append(PlanRow(seq.id, _KINDS[place, False], n_new))
        self.tokens_left -= n_new
        return True

    def chunk(self, seq: SeqView) -> int:
        """Tokens of the next chunk under what is left of the budget; 0 if none."""
        if self.view.enable_chunked_prefill:
            return min(seq.remaining, self.tokens_left)
        return seq.remaining if seq.remaining <= self.tokens_left else 0

    def admit(self, seq: SeqView, place: Place, reserve: int) -> bool:
        """Starts the prefill of a waiting sequence if there is room, budget and a seat for it."""
        need = self.view.need(seq, place)
        if self.seqs == self.view.max_num_seqs or need + reserve > self.free[place]:
            return False
        if not self.prefill(seq, place):
            return False
        self.free[place] -= need
        self.seqs += 1
        return True

    @property
    def has_gpu_work(self) -> bool:
        """Batch-0 is not empty."""
        return bool(self._batches[0])

    def build(self) -> Plan:
        """The plan."""
        batches = tuple(tuple(batch) for batch in self._batches if batch)
        return Plan(batches, tuple(self.swap_out), tuple(self.swap_in), tuple(self.preempted))
