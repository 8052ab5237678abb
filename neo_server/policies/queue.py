"""The CPU decodes of an iteration as counts and sums: what ``candidates`` weighs.

Batches take them from the front of one order, riders from the front of another: a batch that
serves a rider throws away the stages that it has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neo_server.plan import Mode, Seqs, View

TokensOf = Callable[[int], float]  # of the first k


@dataclass(frozen=True, slots=True)
class Queue:
    """Some CPU decodes, real or imagined."""

    count: int
    tokens: TokensOf  # of K and V, in the order in which batches take them
    lost: TokensOf  # that riding has gained already and a batch throws away
    forced: int  # of the first, that any plan has to hold
    on_way: int  # riders that every plan with riders has to hold
    starters: int  # that may start to ride now
    due: int  # of the first of these, that have to where anybody rides
    ride_tokens: TokensOf  # of K and V, those on their way first
    places: int = 0  # that are empty in groups on their way, if all starters may wait for them


def crowd(view: View, count: int, mean: float, forced: int = 0) -> Queue:
    """``count`` alike of ``mean`` tokens in the long run, where some ride at every stage."""
    places = view.ride_groups * view.ride_capacity
    return Queue(
        *(count, lambda k: k * mean, lambda _: 0.0, forced),
        *(0, min(count, places), forced, lambda k: k * mean),
    )


@dataclass(frozen=True, slots=True)
class Orders:
    """CPU decodes in both orders."""

    for_batches: Seqs
    for_riders: Seqs  # those on their way, then all that may start now

    @staticmethod
    def of(view: View, decodes: Seqs) -> Orders:
        """Who has been left out longest goes first; batches take riders on their way last."""
        on_way = decodes.ride > 0
        due = decodes.skipped >= view.max_skipped - 1
        order = np.lexsort((decodes.id, -decodes.skipped, on_way, ~due))
        if Mode.PIGGYBACK not in view.modes:
            return Orders(decodes.take(order), decodes.take(slice(0)))
        first = np.lexsort((decodes.id, -decodes.skipped, on_way))
        starting = first[: min(int((~on_way).sum()), view.ride_capacity)]
        riders = np.concatenate((np.flatnonzero(on_way), starting))
        return Orders(decodes.take(order), decodes.take(riders))

    def queue(self, view: View) -> Queue:
        """Their counts and sums."""
        batches, riders = self.for_batches, self.for_riders
        tokens, ride_tokens = _sums(batches.num_tokens), _sums(riders.num_tokens)
        lost = _sums(batches.ride / max(view.ride_groups, 1))
        due = batches.skipped >= view.max_skipped - 1
        on_way = int((batches.ride > 0).sum())
        return Queue(
            count=len(batches),
            tokens=lambda k: float(tokens[k]),
            lost=lambda k: float(lost[k]),
            forced=int(due.sum()),
            on_way=on_way,
            starters=len(riders) - on_way,
            due=int((due & (batches.ride == 0)).sum()),
            ride_tokens=lambda k: float(ride_tokens[k]),
            places=_places(view, riders.take(slice(on_way)), riders.take(slice(on_way, None))),
        )


def _places(view: View, on_way: Seqs, starters: Seqs) -> int:
    """Empty ones in groups on their way; 0 where a starter would come to starve."""
    if int(starters.skipped.max(initial=0)) + 1 >= view.max_skipped // 2:
        return 0
    return len(np.unique(on_way.ride)) * view.ride_capacity - len(on_way)


def _sums(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Of the first 0, 1, ... of them."""
    return np.concatenate(([0.0], np.cumsum(values)))
