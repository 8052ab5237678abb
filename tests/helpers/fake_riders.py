"""What a gpu worker keeps of riders, and every promise of a plan about them, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

RIDE_CPU = 5
Array = npt.NDArray[Any]


@dataclass
class Member:
    """Who sits in a place, since the stage 0 of its group."""

    slot: int
    start: int
    token: int = -1
    void: bool = False


@dataclass
class Group:
    """One group: the stage of the last plan that named it, and who was named there."""

    stage: int = -1
    members: dict[int, Member] = field(default_factory=dict)  # by place


class RideGroups:
    """``num_groups`` of ``capacity`` places; as many stages, the last of which samples."""

    def __init__(self, num_groups: int, capacity: int) -> None:
        self.num_groups, self.capacity = num_groups, capacity
        self._groups = [Group() for _ in range(num_groups)]

    def check(self, rows: Array) -> None:
        """Before any of them is computed."""
        if not len(rows):
            return
        assert self.num_groups > 0, "riders, but the geometry has no groups"
        places, stages = rows["place"].astype(int), rows["stage"].astype(int)
        assert (rows["kind"] == RIDE_CPU).all()
        assert (rows["n_new"] == 1).all()
        assert (np.diff(places) > 0).all(), "riders not in order of place"
        assert 0 <= places[0] <= places[-1] < self.num_groups * self.capacity
        assert (rows["sample"] == (stages == self.num_groups - 1)).all()
        of = places // self.capacity
        at = {int(group): set(stages[of == group].tolist()) for group in of}
        assert all(len(found) == 1 for found in at.values()), "a group has two stages"
        assert len(set.union(*at.values())) == len(at), "two groups have one stage"
        for group, (stage,) in at.items():
            assert stage in (0, self._groups[group].stage + 1), "a group has missed a stage"
        for row in rows[stages > 0]:
            member = self._member(row)
            assert member is not None, "a rider joins on the way"
            assert (member.slot, member.start) == (int(row["slot"]), int(row["start"]))

    def token(self, row: Array) -> int:
        """The one that is on its way in a place."""
        member = self._member(row)
        assert member is not None
        return member.token

    def pass_stages(
        self, rows: Array, void: Sequence[bool], voids: Callable[[], bool]
    ) -> list[bool]:
        """Everybody moves on; returns who is void. ``void``: without a token at stage 0."""
        seated: dict[int, dict[int, Member]] = {}
        lost = []
        for row, no_token in zip(rows, void, strict=True):
            place, stage = int(row["place"]), int(row["stage"])
            if stage == 0:
                member = Member(int(row["slot"]), int(row["start"]), void=no_token)
            else:
                found = self._member(row)
                assert found is not None
                member = found
                member.void |= voids()  # the attention behind the stage before
            seated.setdefault(place // self.capacity, {})[place] = member
            self._groups[place // self.capacity].stage = stage
            lost.append(member.void)
        for group, members in seated.items():
            self._groups[group].members = members
        return lost

    def take_tokens(self, rows: Array, tokens: Array) -> None:
        """What those at stage 0 begin with."""
        for row in rows[rows["stage"] == 0]:
            member = self._member(row)
            assert member is not None
            member.token = int(tokens[int(row["token_at"])])

    def _member(self, row: Array) -> Member | None:
        place = int(row["place"])
        return self._groups[place // self.capacity].members.get(place)
