"""Riders on a CUDA device: what their kernels need to know, and who of them is void.

A plan with riders has ``ride_capacity`` places before the rows of its first sub-batch, and in each
stage the group that is there stands in them, so that a captured graph serves any plan. All of it
is metadata by stage, uploaded by one copy; empty places touch no memory of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.plan_check import PlanLimits
from gpu_worker.riders import RiderGroup

if TYPE_CHECKING:
    from neo_native import Sequences

Array = npt.NDArray[Any]


class RideLayout:
    """Where each field lies: int32 offsets of [stages] times so many places, with their fill."""

    def __init__(self, limits: PlanLimits) -> None:
        self.stages, self.capacity = limits.ride_groups, limits.ride_capacity
        self.max_rows = limits.max_rows  # of a plan: fewer than all places
        wanted = {
            "collects": (2, 0),  # one int64 a stage: the job taken back; 0: none
            "publishes": (2, 0),
            "group": (1, 0),
            "count": (1, 0),
            "positions": (self.capacity, 0),
            "pages": (self.capacity, -1),
            "page_rows": (self.capacity, 0),
            "store_rows": (self.capacity, -1),  # row of the persistent residual, and of Q
            "tasks": (2 * self.capacity, 0),  # first task and splits in the job taken back
        }
        self._fields: dict[str, tuple[int, int]] = {}
        self.blank = np.empty(self.stages * sum(size for size, _ in wanted.values()), np.int32)
        at = 0
        for name, (size, fill) in wanted.items():
            self._fields[name] = at, size
            self.blank[at : at + self.stages * size] = fill
            at += self.stages * size

    def views(self, buffer: Any) -> dict[str, Any]:
        """Fields of an array or tensor of int32, [stages, size] each; jobs as int64 [stages]."""
        parts = {
            name: buffer[at : at + self.stages * size].reshape(self.stages, size)
            for name, (at, size) in self._fields.items()
        }
        wide = torch.int64 if isinstance(buffer, Tensor) else np.int64
        for name in ("collects", "publishes"):
            at = self._fields[name][0]
            parts[name] = buffer[at : at + 2 * self.stages].view(wide)
        return parts


@dataclass(frozen=True)
class HostRides:
    """The riders of one plan as the host sees them."""

    groups: tuple[RiderGroup, ...]  # by growing stage
    meta: npt.NDArray[np.int32]  # as uploaded
    capacity: int
    first: RiderGroup | None  # whose tokens are embedded
    last: RiderGroup | None  # which is sampled from

    @property
    def sampled(self) -> npt.NDArray[np.intp]:
        """Rows of the plan."""
        if self.last is None:
            return np.empty(0, np.intp)
        return np.arange(self.last.rows.start, self.last.rows.stop)


def host_rides(
    groups: tuple[RiderGroup, ...], layout: RideLayout, sequences: Sequences, page_size: int
) -> HostRides:
    """Fills the metadata but for what ``announce`` gives."""
    meta = layout.blank.copy()
    fields = layout.views(meta)
    stages, counts = [group.stage for group in groups], [len(group.slots) for group in groups]
    numbers = [group.group for group in groups]
    fields["group"][stages, 0], fields["count"][stages, 0] = numbers, counts
    # Riders of all groups at once: a group's lie one behind the other in its stage's row.
    ends = np.cumsum(counts)
    at = np.repeat(stages, counts), np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    slots, positions, places = (
        np.concatenate([getattr(group, name) for group in groups])
        for name in ("slots", "positions", "places")
    )
    fields["positions"][at] = positions
    fields["pages"][at] = sequences.page_table[slots, positions // page_size]
    fields["page_rows"][at] = positions % page_size
    fields["store_rows"][at] = np.repeat(numbers, counts) * layout.capacity + places
    by_stage = {group.stage: group for group in groups}
    return HostRides(
        groups, meta, layout.capacity, by_stage.get(0), by_stage.get(layout.stages - 1)
    )


def announced(
    rides: HostRides, layout: RideLayout, moves: list[tuple[int, int, int, Array]]
) -> int:
    """Puts in the numbers of jobs and the tasks to collect. Returns the tasks published."""
    fields = layout.views(rides.meta)
    tasks = 0
    for group, (collects, publishes, n_tasks, cut) in zip(rides.groups, moves, strict=True):
        fields["collects"][group.stage] = collects
        fields["publishes"][group.stage] = publishes
        fields["tasks"][group.stage, : cut.size] = cut.ravel()
        tasks += n_tasks
    return tasks


class RideBuffers:
    """Memory of riders on the device."""

    def __init__(self, layout: RideLayout, hidden: int, device: torch.device) -> None:
        """``hidden``: width of the residual stream."""
        self.layout = layout
        self.meta = torch.from_numpy(layout.blank.copy()).to(device)
        self.fields: dict[str, Tensor] = layout.views(self.meta)
        self.residual = torch.zeros((layout.stages * layout.capacity, hidden), device=device)
        # By stage: programs that have stored their part of K, V and Q. Zero between plans.
        self.arrived = torch.zeros(layout.stages, dtype=torch.int32, device=device)
        # By stage: the last job that its programs are through waiting for. Numbers of jobs grow.
        self.joined = torch.zeros(layout.stages, dtype=torch.int64, device=device)


class VoidRiders:
    """Who is void, plan after plan: by place, until its stage 0."""

    def __init__(self, layout: RideLayout) -> None:
        self._void = np.zeros((layout.stages, layout.capacity), np.bool_)

    def rows(self, rides: HostRides, given_up: Array, lost: Array) -> npt.NDArray[np.intp]:
        """Rows of the plan that are void.

        ``given_up``: by stage, whether its group's job was. ``lost``: bool by row of the plan,
        whether its token was to come from a void row.
        """
        found = []
        for group in rides.groups:
            void = self._void[group.group]
            if group.stage == 0:
                void[group.places] = lost[group.rows]
            elif given_up[group.stage]:
                void[group.places] = True
            found.append(np.arange(group.rows.start, group.rows.stop)[void[group.places]])
        return np.concatenate(found)
