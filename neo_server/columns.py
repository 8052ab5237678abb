"""The running sequences as columns, kept up to date row by row as plans are made and answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from neo_server.plan import Ints, Seqs, SeqView
from neo_server.request import Sequence as TokenSequence

_NAMES = ("id", "place", "num_tokens", "num_computed", "held", "skipped", "ride")


class Columns:
    """One row per slot; a row's owner writes it, ``view`` sorts the rows by arrival."""

    def __init__(self, slots: int) -> None:
        self._columns = {name: np.zeros(slots, np.int64) for name in _NAMES}
        self._ready = np.zeros(slots, bool)  # may have a row in the next plan
        self._max_len = np.zeros(slots, np.int64)

    def put(self, seq: TokenSequence) -> None:
        """Takes a whole row over from its sequence."""
        slot = seq.slot
        assert slot is not None
        for name, value in zip(_NAMES, seq.view(), strict=True):
            self._columns[name][slot] = value
        self._max_len[slot] = seq.max_len
        self._ready[slot] = seq.num_planned < seq.max_len

    def drop(self, slot: int) -> None:
        """The slot has no sequence that may run."""
        self._ready[slot] = False

    def advance(self, slots: Ints, n_new: Ints, sampled: Ints) -> None:
        """Rows were planned: tokens go into the cache, and ``sampled`` slots will get one more."""
        self._columns["num_computed"][slots] += n_new
        tokens = self._columns["num_tokens"]
        tokens[sampled] += 1
        self._ready[sampled] = tokens[sampled] < self._max_len[sampled]

    def progress(self, slots: Ints) -> tuple[Ints, Ints]:
        """Tokens in the cache, and tokens in all, plans in flight included."""
        return self._columns["num_computed"][slots], self._columns["num_tokens"][slots]

    def grown(self, slots: Ints, size: Ints) -> Ints:
        """Indices of ``slots`` that hold fewer blocks (or pages) than their tokens need."""
        need = -(-self._columns["num_tokens"][slots] // size)
        return np.flatnonzero(need > self._columns["held"][slots])

    def hold(self, slot: int, held: int) -> None:
        """The sequence got blocks or pages."""
        self._columns["held"][slot] = held

    def rode(self, slots: Ints, ride: Ints) -> None:
        """Sets how many linear stages riders have passed."""
        self._columns["ride"][slots] = ride

    def view(self) -> tuple[Seqs, Ints]:
        """Those that may run, by arrival, and their slots."""
        slots = np.flatnonzero(self._ready)
        slots = slots[np.argsort(self._columns["id"][slots])]
        return Seqs(*(self._columns[name][slots] for name in _NAMES)), slots

    def mask(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """Which of all slots are among ``slots``."""
        chosen = np.zeros(len(self._ready), bool)
        chosen[slots] = True
        return chosen

    def note(self, slots: Ints, skipped: Ints) -> None:
        """Sets how long they have been left out."""
        self._columns["skipped"][slots] = skipped


class Waiting(Sequence[SeqView]):
    """The queue, each view made when it is looked at."""

    def __init__(self, queue: list[TokenSequence]) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue)

    @overload
    def __getitem__(self, index: int) -> SeqView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SeqView]: ...
    def __getitem__(self, index: int | slice) -> SeqView | Sequence[SeqView]:
        if isinstance(index, slice):
            return [seq.view() for seq in self._queue[index]]
        return self._queue[index].view()

    def __iter__(self) -> Iterator[SeqView]:
        return map(TokenSequence.view, self._queue)
