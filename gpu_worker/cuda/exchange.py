"""The shared segments as kernels see them, and the host's part of a hand-off.

The host announces, watches and retires; kernels publish, wait and collect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from gpu_worker.cuda import handoff
from gpu_worker.cuda.host_memory import MappedSegment
from gpu_worker.cuda.plan import CpuChunk, HostPlan, HostPlanReader, HostSwap
from gpu_worker.cuda.rides import announced as rides_announced
from gpu_worker.errors import BadPlanError
from neo_native import SwapKind, device_layout

if TYPE_CHECKING:
    from neo_native import Exchange
    from neo_native.segments import SegmentSet

Array = npt.NDArray[Any]

# neo::wire::DType
KV_DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16, 3: torch.int8}
COPY_ROWS = 16  # tokens that one program copies
BACKSTOP = 4.0  # times the watchdog's patience: then a wait on the device ends by itself


@dataclass(frozen=True)
class Places:
    """Tokens in both caches, on the device."""

    index: Tensor  # int32 [3][n and padding]: in the GPU-cache or staging; page; row of the page
    n: int


class DeviceExchange:
    """Views of the pinned segments, and what of them a plan uses."""

    def __init__(
        self,
        exchange: Exchange,
        segments: SegmentSet,
        reader: HostPlanReader,
        act_dtype: torch.dtype,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Raises ``DeviceError`` where a segment cannot be pinned."""
        geometry = segments.geometry
        self._native = exchange
        self._reader = reader
        self._device = device
        self._at = device_layout(geometry)
        self._max_tasks, self._max_rows = int(geometry["max_tasks"]), int(geometry["max_rows"])
        self._n_layers = int(geometry["n_layers"])
        self._kv_heads, self._head_dim = int(geometry["n_kv_heads"]), int(geometry["head_dim"])
        self._mapped = [
            MappedSegment(s) for s in (segments.work, segments.exchange, segments.cpu_cache)
        ]
        work, out, cache = self._mapped
        kv_dtype = KV_DTYPES[int(geometry["kv_dtype"])]
        self.is_int8 = kv_dtype is torch.int8
        self.n_pages, self.page_size = int(geometry["n_pages"]), int(geometry["page_size"])
        self.tiles = cache.view(self._at["tiles"], kv_dtype)
        self.scales = cache.view(self._at["tiles"] + self._at["scales"], torch.float32)
        self.tile_stride = self._at["tile_bytes"] // kv_dtype.itemsize
        self.scale_stride = self._at["tile_bytes"] // 4
        self.area_floats = self._at["area_bytes"] // 4
        self.worker_area_floats = self._at["worker_area_bytes"] // 4
        self.epoch_shift = self._at["task_epoch_shift"]
        self.worker_shift = self._at["task_worker_shift"]
        self.field_mask = self._at["task_field_mask"]
        self.timeout_s = timeout_s
        self.limit_ns = int(timeout_s * BACKSTOP * 1e9)
        self._words = work.view(self._at["tasks"], torch.int64)
        channels = [self._at["channel"] + c * self._at["channel_bytes"] for c in range(2)]
        self._bells = {
            name: [work.view(at + self._at[name], torch.int64)[:1] for at in channels]
            for name in ("published", "done", "abort")
        }
        self._ride_words(work, out, act_dtype)
        channel_q = self._max_rows * self._at["q_row_bytes"]
        self._q = [out.view(self._at["q"] + c * channel_q, act_dtype) for c in range(2)]
        channel_areas = self._max_tasks * self._at["area_bytes"]
        self._areas = [
            out.view(self._at["areas"] + c * channel_areas, torch.float32) for c in range(2)
        ]

    def _ride_words(self, work: MappedSegment, out: MappedSegment, act_dtype: torch.dtype) -> None:
        """What kernels of riders read and write, by group."""
        at = self._at
        self.ride_published = work.view(at["ride_published"], torch.int64)[:1]
        self.ride_abort = work.view(at["ride_abort"], torch.int64)[:1]
        self.ride_done = work.view(at["ride_done"], torch.int64)
        self.ride_done_words = at["ride_done_bytes"] // 8  # between two groups
        self.ride_tasks = at["ride_tasks"]  # of a group
        self.ride_words = work.view(at["ride_words"], torch.int64)
        self.ride_areas = out.view(at["ride_areas"], torch.float32)
        self.ride_q = out.view(at["ride_q"], act_dtype)

    def published(self, channel: int) -> Tensor:
        """Epoch word that the device raises."""
        return self._bells["published"][channel]

    def done(self, channel: int) -> Tensor:
        """Epoch word that the cpu workers raise."""
        return self._bells["done"][channel]

    def abort(self, channel: int) -> Tensor:
        """Epoch word that the watchdog raises."""
        return self._bells["abort"][channel]

    def q(self, channel: int) -> Tensor:
        """[max_rows * heads * head_dim] and beyond, in the activations' dtype."""
        return self._q[channel]

    def words(self, channel: int) -> Tensor:
        """Task words of a channel."""
        return self._words[channel * self._max_tasks :]

    def areas(self, channel: int) -> Tensor:
        """Output areas of worker row 0 for a channel; others follow by ``worker_area_floats``."""
        return self._areas[channel]

    def announce(self, plan: HostPlan) -> int:
        """Writes the descriptors and the metadata that they give. Returns tasks over all layers.

        Raises ``BadPlanError`` for riders that do not follow from the plans before.
        """
        tasks = 0
        moves = [group.move for group in plan.rides.groups] if plan.rides else []
        try:
            announced = self._native.announce(plan.plan_id, *plan.channel_rows(), moves)
        except ValueError as error:  # riders that do not follow from the plans before
            raise BadPlanError(f"plan {plan.plan_id}: {error}") from error
        fields = self._reader.layout.fields
        for batch in plan.batches:
            first_epoch, n_tasks, cut = announced[batch.channel]
            at = fields["first_epoch"].at
            batch.meta[at : at + 2].view(np.int64)[0] = first_epoch
            at = fields["cpu_tasks"].at
            batch.meta[at : at + cut.size] = cut.ravel()
            tasks += n_tasks * self._n_layers
        if plan.rides is not None:
            layout = self._reader.ride_layout
            tasks += rides_announced(plan.rides, layout, self._native.announced_moves())
        return tasks

    def last_ride(self, plan: HostPlan) -> int:
        """Number of the last rider job that the plan takes back; 0: none."""
        if plan.rides is None:
            return 0
        return int(self._reader.ride_layout.views(plan.rides.meta)["collects"].max())

    def ride_progress(self) -> int:
        """Grows whenever a job of riders is done."""
        return self._native.ride_progress()

    def give_up_rides(self, job: int) -> None:
        """Ends the waits of this job and of all before it."""
        self._native.ride_abort_through(job)

    def last_epochs(self, plan: HostPlan) -> dict[int, int]:
        """By channel with CPU rows: the epoch of the last layer."""
        at = self._reader.layout.fields["first_epoch"].at
        return {
            batch.channel: int(batch.meta[at : at + 2].view(np.int64)[0]) + self._n_layers - 1
            for batch in plan.batches
            if batch.n_cpu_rows
        }

    def done_epoch(self, channel: int) -> int:
        """How far the cpu workers are."""
        return self._native.done_epoch(channel)

    def give_up(self, epochs: dict[int, int]) -> None:
        """Ends the waits of these jobs and of all before them."""
        for channel, epoch in epochs.items():
            self._native.abort_through(channel, epoch)

    def retire(self, plan: HostPlan) -> None:
        """The device is through with the plan."""
        self._native.retire(plan.plan_id)

    def swap(self, blocks: Tensor, swap: HostSwap) -> None:
        """All layers of a sequence. ``blocks``: the GPU-cache."""
        self._copy(blocks, 0, len(blocks), self._upload(swap), swap.kind is SwapKind.OUT)

    def find_chunk(self, chunk: CpuChunk) -> Places:
        """Where the sequence's first tokens lie, for every layer of one plan."""
        return self._upload(self._reader.pages_of(chunk.slot, chunk.start))

    def load_chunk(self, staging: Tensor, layer: int, places: Places) -> None:
        """One layer of them into ``staging``, [2][tokens][..]."""
        self._copy(staging.unsqueeze(0), layer, 1, places, to_cpu=False)

    def warm_up(self, blocks: Tensor, staging: Tensor) -> None:
        """Compiles the copies, by moving one token out and back."""
        one = np.zeros(1, np.int32)
        for kind in (SwapKind.OUT, SwapKind.IN):
            self.swap(blocks, HostSwap(kind, one, one, one))
        places = self._upload(HostSwap(SwapKind.IN, one, one, one))
        self._copy(staging.unsqueeze(0), 0, 1, places, to_cpu=False)

    def _upload(self, swap: HostSwap) -> Places:
        n = len(swap.flat)
        places = np.zeros((3, triton.cdiv(n, COPY_ROWS) * COPY_ROWS), np.int32)
        places[:, :n] = swap.flat, swap.pages, swap.page_rows
        pinned = torch.from_numpy(places).pin_memory()
        return Places(pinned.to(self._device, non_blocking=True), n)

    def _copy(
        self, cache: Tensor, first_layer: int, layers: int, places: Places, to_cpu: bool
    ) -> None:
        n = places.n
        if n == 0:
            return
        flat, pages, page_rows = places.index.unbind()
        handoff.copy_pages_kernel[(triton.cdiv(n, COPY_ROWS), layers, 2 * self._kv_heads)](
            cache,
            cache.stride(0),
            cache.stride(1),
            self.tiles,
            self.scales,
            flat,
            pages,
            page_rows,
            n,
            first_layer,
            self.n_pages,
            self.tile_stride,
            self.scale_stride,
            KV_HEADS=self._kv_heads,
            HEAD_DIM=self._head_dim,
            DIM_PAD=triton.next_power_of_2(self._head_dim),
            ROWS=COPY_ROWS,
            TO_CPU=to_cpu,
            INT8=self.is_int8,
        )
