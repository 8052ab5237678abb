"""Riders: CPU decodes on their way through the model, one linear stage per plan (arXiv 2603.12831).

With L layers there are L + 1 linear stages (the last one samples) and as many groups of riders,
each at another stage. In every plan with riders all groups move on by one stage; in plans without
any they stand still. So exactly one group is at stage 0 of a plan, and whoever rides in it was
given a place there and then. Nobody joins or changes places further on; who leaves (finished,
aborted, preempted, moved, void, or served by another kind of plan) leaves a place that stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from neo_native import RowKind
from neo_server.plan import Ints, Rows
from neo_server.request import Sequence

_LEAST_CAPACITY = 8


@dataclass(frozen=True, slots=True)
class WireRows:
    """The rows of a plan as they are sent: the sub-batches', then the riders' by place."""

    sizes: tuple[int, int, int]  # rows of each sub-batch, and riders
    seqs: tuple[Sequence, ...]
    kind: Ints
    n_new: Ints
    stage: Ints  # 0 where no rider
    place: Ints


class Riders:
    """Where the groups are. Their members are the sequences with ``ride`` > 0 themselves."""

    def __init__(self, num_groups: int, capacity: int) -> None:
        """``num_groups``: the model's layers + 1, or 0; ``capacity``: places of a group."""
        self.num_groups = num_groups if capacity else 0
        self.capacity = capacity if num_groups else 0
        self._plans = 0  # with riders, so far

    @property
    def any(self) -> bool:
        """Somebody has ridden: before, nobody is on the way."""
        return self._plans > 0

    @property
    def last_stage(self) -> int:
        """The one that samples."""
        return self.num_groups - 1

    def rows(
        self, batches: SequenceOf[Rows], riders: Ints, running: Mapping[int, Sequence]
    ) -> WireRows:
        """Of a plan that ``check_plan`` let pass; the groups move on if it has riders."""
        seqs = [running[seq_id] for batch in batches for seq_id in batch.seq.tolist()]
        if self.any:
            for seq in seqs:  # a row of its own takes a rider out of its group
                seq.ride = 0
        riding, stage, place = self._advance([running[seq_id] for seq_id in riders.tolist()])
        kinds = np.full(len(riding), int(RowKind.RIDE_CPU), np.int64)
        sizes = [len(batch) for batch in batches] + [0, 0]
        no_rider = np.zeros(len(seqs), np.int64)
        return WireRows(
            (sizes[0], sizes[1], len(riding)),
            (*seqs, *riding),
            np.concatenate([*(batch.kind for batch in batches), kinds]),
            np.concatenate([*(batch.n_new for batch in batches), np.ones(len(riding), np.int64)]),
            np.concatenate((no_rider, stage)),
            np.concatenate((no_rider, place)),
        )

    def _advance(self, riders: list[Sequence]) -> tuple[list[Sequence], Ints, Ints]:
        """By place: riders, stage and place. Those at stage 0 get one in the group that starts."""
        if not riders:
            return [], np.empty(0, np.int64), np.empty(0, np.int64)
        starting = self._plans % self.num_groups
        self._plans += 1
        stages = [seq.ride for seq in riders]
        given = starting * self.capacity
        for seq in riders:
            if seq.ride == 0:
                seq.ride_place = given
                given += 1
            seq.ride = (seq.ride + 1) % self.num_groups
        place = np.array([seq.ride_place for seq in riders], np.int64)
        order = np.argsort(place)
        return [riders[i] for i in order.tolist()], np.array(stages, np.int64)[order], place[order]


def group_capacity(num_groups: int, max_num_seqs: int) -> int:
    """Places of a group with which every sequence may ride at once in half of the groups.

    Each group in use costs a hand-off in every iteration, so few full ones are better than many.
    """
    return max(-(-2 * max_num_seqs // num_groups), _LEAST_CAPACITY)
