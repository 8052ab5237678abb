"""A stand-in for the CPU-cache and the cpu workers that computes in the caller's thread."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import CpuDecodes, Plan
from gpu_worker.riders import RiderGroup

Array = npt.NDArray[Any]


class FakeCpuSide:
    """Keeps K and V by (layer, slot, position) and refuses what was never stored."""

    def __init__(self, never_done_from: tuple[int, int] | None = None) -> None:
        """``never_done_from``: (channel, layer) from which that channel's jobs never finish."""
        self.kv: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.jobs: dict[int, Tensor] = {}
        self.rides: dict[int, dict[int, Tensor]] = {}  # O by group and place
        self.rides_stuck = False  # jobs of riders never finish
        self.events: list[tuple[str, int, int]] = []
        self._never_done_from = never_done_from
        self._plan: Plan | None = None
        self._voided: set[int] = set()
        self._layer: dict[int, int] = {}
        self.tasks = 0

    @property
    def voided(self) -> frozenset[int]:
        return frozenset(self._voided)

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self._voided.clear()
        self.tasks = 0

    def end(self) -> None:
        self._plan = None

    def store_rows(self, layer: int, rows: CpuDecodes | RiderGroup, k: Tensor, v: Tensor) -> None:
        for i, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            self.kv[layer, int(slot), int(position)] = k[i].clone(), v[i].clone()

    def store_span(self, layer: int, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        for i in range(len(k)):
            self.kv[layer, slot, start + i] = k[i].clone(), v[i].clone()

    def load_span(self, layer: int, slot: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        pairs = [self.kv[layer, slot, i] for i in range(n_tokens)]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def publish(self, channel: int, layer: int, q: Tensor) -> None:
        self._layer[channel] = layer
        self.events.append(("publish", channel, layer))
        if channel in self._voided:
            return
        assert self._plan is not None
        slots, lengths = self._plan.channel_rows(channel)
        self.jobs[channel] = self._attention(layer, slots, lengths, q)

    def _attention(self, layer: int, slots: Array, lengths: Array, q: Tensor) -> Tensor:
        out = []
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            k, v = self.load_span(layer, int(slot), int(length))
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("hd,lhd->hl", q[row], k) / q.shape[-1] ** 0.5
            out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
        self.tasks += len(out)
        return torch.stack(out)

    def _group(self, group: int) -> RiderGroup:
        assert self._plan is not None
        return next(riders for riders in self._plan.riders if riders.group == group)

    def ride_publish(self, group: int, q: Tensor) -> None:
        riders = self._group(group)
        self.events.append(("ride", group, riders.stage))
        out = self._attention(riders.stage, riders.slots, riders.seq_lens, q)
        self.rides[group] = dict(zip(riders.places.tolist(), out, strict=True))

    def ride_wait(self, group: int) -> bool:
        return not self.rides_stuck

    def ride_collect(self, group: int, out: Tensor) -> None:
        done = self.rides.pop(group)
        out.copy_(torch.stack([done[place] for place in self._group(group).places.tolist()]))

    def wait(self, channel: int) -> bool:
        self.events.append(("wait", channel, self._layer[channel]))
        if self._never_done_from is not None:
            stuck, layer = self._never_done_from
            if channel == stuck and self._layer[channel] >= layer:
                self._voided.add(channel)
                return False
        return True

    def collect(self, channel: int, out: Tensor) -> None:
        out.copy_(self.jobs.pop(channel))
