"""An executor's device, recorded: copies and iterations are operations on named places.

A place is a token of a layer in either cache, or a staging buffer of later chunks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cuda.chunks import ChunkLoads
from gpu_worker.cuda.copies import Copies
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.spans import SpanTable, SpanUploads, table_size
from gpu_worker.cuda.streams import Lane
from gpu_worker.plan_check import PlanLimits
from neo_native import RowKind, SwapKind
from neo_server.geometry import PLANS_IN_FLIGHT
from tests.helpers.recorded_streams import RecordedStreams
from tests.unit.neo_server.simulation import Sizes

CPU = torch.device("cpu")
LAYERS = 6
ROWS = 16  # tokens of a group


def limits_of(sizes: Sizes) -> PlanLimits:
    return PlanLimits(
        max_rows=sizes.max_num_seqs, max_tokens=sizes.budget, max_swaps=sizes.max_num_seqs,
        max_slots=sizes.max_num_seqs, block_size=sizes.block_size, num_blocks=sizes.gpu_blocks,
        max_blocks=-(-sizes.max_model_len // sizes.block_size), page_size=sizes.page_size,
        max_pages=-(-sizes.max_model_len // sizes.page_size), num_pages=sizes.cpu_pages,
        max_positions=sizes.max_model_len, vocab_size=251,
        ride_groups=sizes.layers + 1 if sizes.ride_capacity else 0,
        ride_capacity=sizes.ride_capacity,
    )  # fmt: skip


class RecordedExchange:
    """Copies as operations on the places that the uploaded table names."""

    timeout_s = 1.0

    def __init__(self, reader: HostPlanReader, streams: RecordedStreams, cache: Tensor) -> None:
        self.streams = streams
        self._reader = reader
        self._cache = cache
        limits = reader.limits
        self._size = table_size(
            limits.max_rows, limits.num_pages * limits.page_size, ROWS, 999, limits.num_pages
        )
        self.staging = torch.zeros(2, 2, 1, limits.max_positions, 1, 1)
        self.loads = ChunkLoads(
            self, reader.pages_of, streams, self.staging, self._uploads(Lane.IN)
        )

    def _uploads(self, lane: Lane) -> SpanUploads:
        return SpanUploads(self._size, ROWS, lane, self.streams, CPU, PLANS_IN_FLIGHT)

    def copies(self, cache: Tensor, depth: int) -> Copies:
        uploads = {lane: self._uploads(lane) for lane in (Lane.OUT, Lane.IN)}
        return Copies(self, cache, self._reader.layout, self.streams, uploads, depth)

    def copy_pages(
        self, cache: Tensor, layers: range, table: SpanTable, groups: range, kind: SwapKind
    ) -> None:
        on_gpu, on_cpu = named_by(table, groups, cache.shape[3], self._reader.limits.page_size)
        here: list[Any] = [("cpu", token, layer) for token in on_cpu for layer in layers]
        if cache.data_ptr() in (self.staging[0].data_ptr(), self.staging[1].data_ptr()):
            there: list[Any] = [buffer_of(self, cache)]
        else:
            assert torch.equal(cache, self._cache[layers.start : layers.stop])
            there = [("gpu", token, layer) for token in on_gpu for layer in layers]
        if kind is SwapKind.OUT:
            self.streams.operate("swap-out", reads=there, writes=here)
        else:
            self.streams.operate("in", reads=here, writes=there)

    def announce(self, plan: HostPlan) -> int:
        return 0

    def last_epochs(self, plan: HostPlan) -> dict[int, int]:
        return {}

    def last_ride(self, plan: HostPlan) -> int:
        return 0

    def retire(self, plan: HostPlan) -> None:
        pass


def buffer_of(exchange: RecordedExchange, cache: Tensor) -> tuple[str, int]:
    return "staging", int(cache.data_ptr() == exchange.staging[1].data_ptr())


def named_by(
    table: SpanTable, groups: range, block_size: int, page_size: int
) -> tuple[set[int], set[int]]:
    """Tokens of both caches, by number, that some groups name to the kernel."""
    ints = table.ints.tolist()
    on_gpu, on_cpu = set(), set()
    for group in groups:
        first, n, blocks_at, pages_at = ints[4 * ints[table.groups_at + group] :][:4]
        begin = (group - first) * table.rows
        for at in range(begin, min(begin + table.rows, n)):
            block = ints[table.entries_at + blocks_at + at // block_size]
            page = ints[table.entries_at + pages_at + at // page_size]
            on_gpu.add(block * block_size + at % block_size)
            on_cpu.add(page * page_size + at % page_size)
    return on_gpu, on_cpu


class RecordedStages:
    """Iterations as operations on the places that their rows name."""

    def __init__(self, exchange: RecordedExchange, sequences: Any, limits: PlanLimits) -> None:
        self.exchange = exchange
        self._sequences = sequences
        self._limits = limits
        layout = exchange._reader.layout
        rides = exchange._reader.ride_layout
        meta = torch.zeros(layout.size, dtype=torch.int32)
        self.buffers = SimpleNamespace(
            channels=[SimpleNamespace(meta=meta)] * 2,
            rides=SimpleNamespace(layout=rides, meta=torch.from_numpy(rides.blank.copy()))
            if limits.ride_groups
            else None,
            outcome=torch.zeros(3, 64 + 2 * limits.max_rows, dtype=torch.int32),
            rows=limits.max_rows,
        )
        self.rows: Any = None  # of the plan to come

    def forward(self, shapes: Any, at_end: Any = None, at_layer: Any = None) -> None:
        """As ``Stages``."""
        chunks = [chunk for shape in shapes for chunk in shape.cpu_chunks]
        self.exchange.loads.begin(chunks, LAYERS)
        for layer in range(LAYERS):
            if at_layer is not None:
                at_layer(layer)
            self.layer(layer)
            for _ in chunks:
                taken = buffer_of(self.exchange, self.exchange.loads.take())
                self.exchange.streams.operate("attend", reads=[taken])
                self.exchange.loads.done()

    def replay(self) -> None:
        """All layers of a graph; its loads are within it."""
        for layer in range(LAYERS):
            self.exchange.streams.operate("load", writes=[("staging", layer % 2)])
            self.layer(layer)
            self.exchange.streams.operate("attend", reads=[("staging", layer % 2)])

    def layer(self, layer: int) -> None:
        reads, writes = set(), set()
        for slot, kind, start, n_new, stage in self.rows:
            if kind == RowKind.RIDE_CPU and stage != layer:
                continue
            on_cpu = kind % 2 == 1
            name, table, size = (
                ("cpu", self._sequences.page_table, self._limits.page_size)
                if on_cpu
                else ("gpu", self._sequences.block_table, self._limits.block_size)
            )
            at = np.arange(start + n_new)
            tokens = table[slot, at // size].astype(int) * size + at % size
            places = [(name, int(token), layer) for token in tokens]
            reads.update(places)
            writes.update(places[start:])
        self.exchange.streams.operate("compute", reads, writes)


class RecordedEvent:
    """In place of CUDA's; of the lane of iterations."""

    streams: RecordedStreams

    def record(self) -> None:
        self._mark = self.streams.mark(Lane.COMPUTE)

    def query(self) -> bool:
        return self._mark.query()

    def synchronize(self) -> None:
        self._mark.synchronize()

    def elapsed_time(self, end: RecordedEvent) -> float:
        return 0.0


class NoDrawing:
    """In place of sampling."""

    def __init__(self, buffers: Any, features: Any) -> None:
        pass

    def record(self, plan: HostPlan) -> None:
        pass

    def draw(self, plan: HostPlan) -> list[Any]:
        return []
