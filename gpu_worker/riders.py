"""Riders: CPU decodes that pass one linear stage in each plan (attention piggybacking).

A group of riders joins the rows of a sub-batch for one stage, with no pass over the weights of its
own (arXiv 2603.12831). Between two stages its residual rows stay here, and the cpu workers do its
attention, for which they have until the group's next plan. ``protos/wire.hpp`` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.model import Activations, LlamaModel
from gpu_worker.plan_check import UNKNOWN_TOKEN, PlanLimits
from gpu_worker.wanted import Recorded, recorded_riders

if TYPE_CHECKING:
    from gpu_worker.batch import PlanColumns
    from gpu_worker.offload import Offload
    from gpu_worker.timing import StageTimer
    from neo_native import Sequences

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Continued:
    """Decodes whose token a plan before samples: planned before that one reported."""

    tokens: npt.NDArray[np.int64]  # of the sub-batch, or of the group
    rows: npt.NDArray[np.int64]  # of the plan
    slots: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class RiderGroup:
    """The riders of one group in one plan, by place."""

    group: int
    stage: int
    rows: slice  # of the plan
    places: npt.NDArray[np.uint32]  # indices in the group
    slots: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.uint32]
    tokens: Tensor  # int64 [riders], looked at in stage 0
    token_positions: Tensor  # int64 [riders]
    continued: Continued | None  # in stage 0
    recorded: Recorded | None  # in stage 0: of its tokens, those that penalties will count

    @property
    def seq_lens(self) -> npt.NDArray[np.uint32]:
        """Tokens to attend over, with the one being decoded."""
        return self.positions + np.uint32(1)

    @property
    def move(self) -> tuple[int, int, Array, Array, Array]:
        """As ``Exchange.begin_plan`` takes it."""
        return self.group, self.stage, self.places, self.slots, self.seq_lens


def read_riders(
    rows: Array,
    at: int,
    columns: PlanColumns,
    sequences: Sequences,
    limits: PlanLimits,
    device: torch.device,
) -> tuple[RiderGroup, ...]:
    """Groups by growing stage. ``rows``: StepRow of all riders, a checked part of the plan.

    ``at``: the first of them among the plan's rows, which ``columns`` describe.
    """
    if not len(rows):
        return ()
    capacity = np.uint32(limits.ride_capacity)
    group_of, places = rows["place"] // capacity, rows["place"] % capacity
    bounds = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist(), len(rows)]
    all_of = slice(at, at + len(rows))
    ids, slots = columns.token_ids[columns.first[all_of]], columns.slots[all_of]
    positions = columns.starts[all_of]
    narrow = positions.astype(np.uint32)
    tokens = torch.from_numpy(ids.clip(min=0)).to(device)
    token_positions = torch.from_numpy(positions).to(device)
    groups = []
    for low, high in pairwise(bounds):
        stage, bound = int(rows["stage"][low]), slice(at + low, at + high)
        groups.append(
            RiderGroup(
                group=int(group_of[low]),
                stage=stage,
                rows=bound,
                places=places[low:high],
                slots=slots[low:high],
                positions=narrow[low:high],
                tokens=tokens[low:high],
                token_positions=token_positions[low:high],
                continued=_continued(ids[low:high], at + low, columns) if stage == 0 else None,
                recorded=recorded_riders(sequences, columns, bound) if stage == 0 else None,
            )
        )
    return tuple(sorted(groups, key=lambda group: group.stage))


def _continued(ids: npt.NDArray[np.int64], at: int, columns: PlanColumns) -> Continued | None:
    unknown = np.flatnonzero(ids == UNKNOWN_TOKEN)
    if not len(unknown):
        return None
    return Continued(unknown, at + unknown, columns.slots[at + unknown])


class RideStore:
    """What stays of riders between two plans: residual rows, and who is void."""

    def __init__(self, groups: int, capacity: int, hidden: int, device: torch.device) -> None:
        """``hidden``: width of the residual stream."""
        self.residual = torch.zeros((groups, capacity, hidden), device=device)  # fp32
        self.void = np.zeros((groups, capacity), np.bool_)


class Riding:
    """The riders of one plan: each group joins a sub-batch's rows in its stage and leaves them."""

    def __init__(
        self,
        groups: Iterable[RiderGroup],
        lost: Iterable[int],
        store: RideStore,
        model: LlamaModel,
        offload: Offload,
    ) -> None:
        """``lost``: rows of the plan whose token was to come from a row that was void."""
        self._by_stage = {group.stage: group for group in groups}
        self._store = store
        self._model = model
        self._offload = offload
        gone = set(lost)
        for group in self._by_stage.values():
            if group.stage == 0:
                rows = range(group.rows.start, group.rows.stop)
                store.void[group.group, group.places] = [row in gone for row in rows]

    def __bool__(self) -> bool:
        return bool(self._by_stage)

    @property
    def room(self) -> int:
        """Rows of the largest group."""
        return max((len(group.slots) for group in self._by_stage.values()), default=0)

    def join(self, x: Activations, n: int, stage: int, timer: StageTimer) -> int:
        """Puts the stage's group behind the first ``n`` rows of ``x``; returns all rows then."""
        group = self._by_stage.get(stage)
        if group is None:
            return n
        mine = slice(n, n + len(group.slots))
        if stage == 0:
            riders = self._model.embed(group.tokens, group.token_positions)
            x.residual[mine] = riders.residual
            x.cos[mine], x.sin[mine] = riders.cos, riders.sin
            return mine.stop
        x.residual[mine] = self._store.residual[group.group, self._places(group)]
        x.cos[mine], x.sin[mine] = self._model.rope(group.token_positions)
        self._take_back(group, x.attn[mine], timer)
        return mine.stop

    def _take_back(self, group: RiderGroup, out: Tensor, timer: StageTimer) -> None:
        """O of the layer before; void riders go on with zeros, unused."""
        void = self._store.void[group.group]
        timer.lap("handoff")
        done = not void[group.places].all() and self._offload.ride_wait(group.group)
        timer.lap("ride_wait")
        if done:
            self._offload.ride_collect(group.group, out)
        else:
            void[group.places] = True
            out.zero_()

    def leave(self, x: Activations, n: int, stage: int) -> None:
        """After the linear stage: K and V into the CPU-cache, Q to the cpu workers."""
        group = self._by_stage.get(stage)
        if group is None:
            return
        mine = slice(n, n + len(group.slots))
        self._store.residual[group.group, self._places(group)] = x.residual[mine]
        if stage < self._model.config.num_hidden_layers:
            self._offload.store_rows(stage, group, x.k[mine], x.v[mine])
            self._offload.ride_publish(group.group, x.q[mine])

    def sampled(self) -> list[Tensor]:
        """Residual rows after the last stage, fp32 [riders, hidden], if a group is there."""
        group = self._by_stage.get(self._model.config.num_hidden_layers)
        if group is None:
            return []
        return [self._store.residual[group.group, self._places(group)]]

    def void_rows(self) -> npt.NDArray[np.int64]:
        """Rows of the plan whose riders are void."""
        rows = [
            np.arange(group.rows.start, group.rows.stop)[
                self._store.void[group.group, group.places]
            ]
            for group in self._by_stage.values()
        ]
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    def _places(self, group: RiderGroup) -> Tensor:
        return torch.from_numpy(group.places.astype(np.int64)).to(self._store.residual.device)


def with_room(x: Activations, room: int) -> Activations:
    """The same rows with ``room`` more behind them, not set."""
    if room == 0:
        return x
    return Activations(
        residual=_grown(x.residual, room),
        cos=_grown(x.cos, room),
        sin=_grown(x.sin, room),
        q=x.q,
        k=x.k,
        v=x.v,
        attn=_grown(x.attn, room),
    )


def _grown(tensor: Tensor, room: int) -> Tensor:
    out = tensor.new_empty((len(tensor) + room, *tensor.shape[1:]))
    out[: len(tensor)] = tensor
    return out


def linear_stage(model: LlamaModel, x: Activations, rows: int, layer: int) -> None:
    """``LlamaModel.linear_stage`` over the first ``rows``, in place where it has them."""
    if rows == len(x.residual):
        model.linear_stage(x, layer)
        return
    part = Activations(x.residual[:rows], x.cos[:rows], x.sin[:rows], x.q, x.k, x.v, x.attn[:rows])
    model.linear_stage(part, layer)
    x.q, x.k, x.v = part.q, part.k, part.v
