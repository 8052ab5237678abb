"""The shared segments as kernels see them, and the host's part of a hand-off.

The host announces, watches and retires; kernels publish, wait and collect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from gpu_worker.cuda.chunks import ChunkLoads
from gpu_worker.cuda.copies import Copies
from gpu_worker.cuda.host_memory import MappedSegment
from gpu_worker.cuda.page_copies import copy_pages_kernel
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.rides import announced as rides_announced
from gpu_worker.cuda.spans import HostSwap, SpanTable, SpanUploads, span_table, table_size
from gpu_worker.cuda.streams import Lane, Streams, streams_of
from gpu_worker.cuda.tiles import copy_tiles
from gpu_worker.errors import BadPlanError
from neo_native import SwapKind, WireDType, device_layout

if TYPE_CHECKING:
    from neo_native import Exchange, Segment
    from neo_native.segments import SegmentSet

Array = npt.NDArray[Any]

KV_DTYPES = {
    WireDType.FLOAT32: torch.float32,
    WireDType.FLOAT16: torch.float16,
    WireDType.BFLOAT16: torch.bfloat16,
    WireDType.INT8: torch.int8,
}
BACKSTOP = 4.0  # times the watchdog's patience: then a wait on the device ends by itself


def device_segments(segments: SegmentSet) -> tuple[Segment, Segment, Segment]:
    """Those that kernels read and write."""
    return segments.work, segments.exchange, segments.cpu_cache


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
        pinned: Sequence[MappedSegment] | None = None,
    ) -> None:
        """``pinned``: what ``device_segments`` gives; None: here, or ``PinningError``."""
        geometry = segments.geometry
        self._native = exchange
        self._reader = reader
        self._device = device
        self.streams: Streams = streams_of(device)
        self._at = device_layout(geometry)
        self._max_tasks, self._max_rows = int(geometry["max_tasks"]), int(geometry["max_rows"])
        self._n_layers = int(geometry["n_layers"])
        self._kv_heads, self._head_dim = int(geometry["n_kv_heads"]), int(geometry["head_dim"])
        self._mapped = pinned or [MappedSegment(s) for s in device_segments(segments)]
        work, out, cache = self._mapped
        kv_dtype = KV_DTYPES[WireDType(int(geometry["kv_dtype"]))]
        self.is_int8 = kv_dtype is torch.int8
        self.n_pages, self.page_size = int(geometry["n_pages"]), int(geometry["page_size"])
        self._dim_pad = triton.next_power_of_2(self._head_dim)
        sizes = self._dim_pad, kv_dtype.itemsize, self.page_size, self._kv_heads
        self.copy_tiles = copy_tiles(*sizes)
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

    def copies(self, cache: Tensor, depth: int) -> Copies:
        """The swaps of plans. ``cache``: the GPU-cache's blocks; ``depth``: plans in flight."""
        limits = self._reader.limits
        tokens = cache.shape[2] * cache.shape[3]
        pages = self._most_pages(tokens, limits.max_swaps)
        rows = self.copy_tiles.rows
        size = table_size(limits.max_swaps, tokens, rows, cache.shape[2], pages)
        uploads = {lane: self._uploads(size, lane, depth) for lane in (Lane.OUT, Lane.IN)}
        layout = self._reader.layout
        return Copies(self, cache, layout, self.streams, uploads, depth)

    def chunk_loads(self, staging: Tensor) -> ChunkLoads:
        """The earlier chunks of CPU prefills. ``staging``: see ``Buffers``."""
        rows, tokens = self._reader.limits.max_rows, self.n_pages * self.page_size
        pages = self._most_pages(tokens, rows)
        size = table_size(rows, tokens, self.copy_tiles.rows, rows, pages)
        uploads = self._uploads(size, Lane.IN)
        return ChunkLoads(self, self._reader.pages_of, self.streams, staging, uploads)

    def _most_pages(self, tokens: int, sequences: int) -> int:
        """That so many tokens can lie in."""
        return min(tokens // self.page_size + sequences, self.n_pages)

    def _uploads(self, size: int, lane: Lane, depth: int = 2) -> SpanUploads:
        rows = self.copy_tiles.rows
        return SpanUploads(size, rows, lane, self.streams, self._device, depth)

    def swap(self, blocks: Tensor, swap: HostSwap) -> None:
        """All layers of a sequence on the current stream, for one that no plan moves.

        ``blocks``: the GPU-cache. Allocates; plans go through ``gpu_worker.cuda.copies``.
        """
        table = span_table([swap], self.copy_tiles.rows)
        table = table.on(torch.from_numpy(table.ints).to(self._device))
        self.copy_pages(blocks, range(len(blocks)), table, table.groups[0], swap.kind)

    def warm_up(self, blocks: Tensor, staging: Tensor) -> None:
        """Compiles the copies, by moving one token out and back, and in for a later chunk."""
        one = np.zeros(1, np.int32)
        moves = (SwapKind.OUT, blocks), (SwapKind.IN, blocks), (SwapKind.IN, staging[:1])
        for kind, to in moves:
            self.swap(to, HostSwap(kind, 0, 1, one, one))

    def copy_pages(
        self, cache: Tensor, layers: range, table: SpanTable, groups: range, kind: SwapKind
    ) -> None:
        """Some layers of a part of a table's spans.

        ``cache``: of these layers, [layers][2][blocks][tokens of a block][kv_heads][head_dim].
        """
        sizes = self.copy_tiles
        items = len(groups) * len(layers) * 2 * self._kv_heads // sizes.tiles
        if items == 0:
            return
        copy_pages_kernel[(min(items, sizes.programs),)](
            cache,
            cache.stride(0),
            cache.stride(1),
            self.tiles,
            self.scales,
            table.ints,
            table.groups_at,
            table.entries_at,
            groups.start,
            len(groups),
            layers.start,
            len(layers),
            cache.shape[3],
            self.page_size,
            self.n_pages,
            self.tile_stride,
            self.scale_stride,
            KV_HEADS=self._kv_heads,
            HEAD_DIM=self._head_dim,
            DIM_PAD=self._dim_pad,
            ROWS=table.rows,
            TILES=sizes.tiles,
            TO_CPU=kind is SwapKind.OUT,
            INT8=self.is_int8,
            OPEN=table.is_open,
            num_warps=sizes.warps,
        )
