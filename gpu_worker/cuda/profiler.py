"""The stage times of the CUDA path, each measured inside a captured graph as plans run it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.events import Event, graph_seconds
from gpu_worker.cuda.plan import TILE_Q
from gpu_worker.cuda.ride_trial import BesideRows, captured, replayed, timed
from gpu_worker.cuda.spans import HostSwap
from gpu_worker.cuda.stages import Stages
from gpu_worker.profiler import POINT_S, REPEATS, Measured, Profiler, RoundTrip, up_to
from neo_native import SwapKind

if TYPE_CHECKING:
    from neo_native import Exchange


logger = logging.getLogger(__name__)

RIDDEN_ROWS, RIDDEN_TOKENS = 32, 512  # decodes that riders are measured beside, and of each
STAGED = (256, 1024)  # earlier tokens of a later chunk
STAGED_CHUNK = 128  # its new ones
STORED = (64, 512)  # tokens of CPU prefills


@dataclass(frozen=True)
class Captured:
    """A call that is timed as part of a graph."""

    call: Callable[[], object]

    def __call__(self) -> object:
        """Once, uncaptured."""
        return self.call()


class CudaProfiler(Profiler):
    """As ``Profiler``, over the kernels of ``gpu_worker.cuda``."""

    overlaps_transfers = True  # ``gpu_worker.cuda.copies``

    def use(self, stages: Stages, exchange: Exchange) -> None:
        """Before ``run``."""
        self._stages = stages
        self._native = exchange

    def _time(self, call: Callable[[], object]) -> float:
        if not isinstance(call, Captured):
            return super()._time(call)
        stop = min(time.perf_counter() + POINT_S, self._deadline)
        return graph_seconds(call, REPEATS, stop)

    def _blank(self, tokens: int) -> None:
        """No rows in the metadata; activations of ``tokens`` at random, whatever is measured.

        Not zeros, which a device multiplies faster: they take less power.
        """
        self._stages.buffers.blank()
        channel = self._stages.buffers.channels[0]
        for activations in (channel.residual, channel.qkv, channel.attn):
            activations[:tokens].normal_()

    def _linear(self, tokens: int) -> Callable[[], object]:
        self._blank(tokens)
        shape = Shape(0, tokens, 0)

        def run() -> None:
            self._stages.linear(shape, self._layer)
            self._stages.store(shape, self._layer)

        return Captured(run)

    def _head(self, rows: int) -> Callable[[], object]:
        self._blank(rows)
        shape = Shape(0, rows, 0, sampled=rows)
        return Captured(lambda: self._stages.head(shape))

    def _prefill_attn(self, tokens: int) -> Callable[[], object]:
        self._blank(tokens)
        fields = self._stages.buffers.channels[0].fields
        tiles = -(-tokens // TILE_Q)
        firsts = torch.arange(tiles, device=self._model.device).flip(0)  # as plans have them
        fields["tile_firsts"][:tiles] = firsts * TILE_Q
        fields["tile_rows"][:tiles] = 0
        fields["prefill_news"][0] = tokens
        shape = Shape(0, tokens, 0, tiles=tiles)
        return Captured(lambda: self._stages.attend(shape, 0))

    def _gpu_attn(self, rows: int, length: int) -> Callable[[], object]:
        self._blank(rows)
        size = self._cache.block_size
        fields = self._stages.buffers.channels[0].fields
        # The longest slot of the CPU-cache ends with a page, a block table with a block.
        columns = min(-(-length // size), len(fields["tables"]) // rows)
        blocks = np.random.default_rng(0).integers(0, self._cache.num_blocks, rows * columns)
        fields["tables"][: rows * columns] = torch.from_numpy(blocks).to(self._model.device)
        fields["table_stride"][0] = columns
        fields["row_lens"][:rows] = min(length, columns * size)
        fields["row_tokens"][:rows] = torch.arange(rows, device=self._model.device)
        shape = Shape(0, rows, rows)
        return Captured(lambda: self._stages.attend(shape, 0))

    def _offloaded(self, rows: int, length: int) -> Callable[[], RoundTrip]:
        """Publishing, waiting and collecting in a graph: the pool spins from layer to layer."""
        exchange = self._stages.exchange
        assert exchange is not None
        patience_s, layers = exchange.timeout_s, self._layers(rows, length)
        self._stages.buffers.blank()
        fields, device = self._stages.buffers.channels[0].fields, self._model.device
        none = np.empty(0, np.uint32)
        slots, lens = np.arange(rows, dtype=np.uint32), np.full(rows, length, np.uint32)
        fields["cpu_count"][0] = rows
        for name in ("q_rows", "cpu_tokens"):
            fields[name][:rows] = torch.arange(rows, device=device)
        fields["pages"][:rows] = torch.arange(rows, device=device) % exchange.n_pages
        shape = Shape(0, rows, 0, rows, to_cpu=True)

        def enqueue() -> None:
            for layer in range(layers):
                self._stages.store(shape, layer)
                self._stages.join(shape, layer + 1)

        graph = captured(enqueue)  # without an epoch: nobody waits

        def run() -> RoundTrip:
            (first, _, tasks), _ = self._native.announce(0, (slots, none), (lens, none))
            try:
                self._stages.buffers.outcome.zero_()  # void no more
                fields["first_epoch"].fill_(first)
                host = torch.from_numpy(tasks.astype(np.int32).ravel())
                fields["cpu_tasks"][: 2 * rows] = host.to(device)
                last = first + layers - 1
                give_up = partial(self._native.abort_through, 0, last)
                seconds = replayed(graph, patience_s, give_up)
                waited = float(self._stages.buffers.waited_ns(0)) * 1e-9
                return RoundTrip(seconds / layers, waited / layers)
            finally:
                self._native.retire(0)

        return run

    def _ride_handoff(self) -> dict[str, list[float]] | None:
        """What riders add to an iteration, per layer, over riders of each group."""
        rides = self._stages.buffers.rides
        if self._threads == 0 or rides is None:
            return None
        _, rows, length = self._limits
        lead = rides.layout.capacity
        layers = self._model.config.num_hidden_layers
        empty = 0.0  # of a layer without riders: measured first

        def make(riders: int) -> Callable[[], object]:
            run = self.riders(riders, lead, min(RIDDEN_ROWS, rows), min(RIDDEN_TOKENS, length))

            def added() -> float:
                nonlocal empty
                found = run()
                moved = min(found.groups, layers)
                extra = found.riding - found.alone
                if moved == 0:
                    empty = max(extra, 0.0) / layers
                    return empty
                return max(extra - (layers - moved) * empty, 0.0) / moved

            return Measured(added)

        try:
            return self._curve(make, sorted({0, 1, lead}))
        except TimeoutError as error:
            logger.warning("what riders cost is not known: %s", error)
            return None

    def riders(self, riders: int, lead: int, rows: int, length: int) -> Callable[[], BesideRows]:
        """Iterations of ``rows`` decodes of ``length`` tokens, with and without riders.

        ``lead``: places for riders in the shape, at most a group's; ``riders`` of them are taken.
        """
        self._gpu_attn(rows, length)
        fields = self._stages.buffers.channels[0].fields
        fields["row_tokens"][:rows] += lead
        shape = Shape(0, lead + rows, rows, lead=lead)
        return timed(self._stages, self._native, riders, shape)

    def _staging(self) -> dict[str, list[float]] | None:
        """What a later chunk on the CPU takes longer, per layer, for what it fetches."""
        if self._threads == 0:
            return None
        return self._curve(self._fetching, up_to(STAGED, self._limits[2]))

    def _fetching(self, earlier: int) -> Callable[[], object]:
        """Iterations of such a chunk, that of a graph, less those whose copies find no tokens."""
        exchange, buffers = self._stages.exchange, self._stages.buffers
        assert exchange is not None
        new = min(STAGED_CHUNK, self._limits[0])
        self._prefill_attn(new)
        fields = buffers.channels[0].fields
        fields["prefill_starts"][0] = earlier
        fields["prefill_tables"][0] = -1
        pages = np.arange(-(-earlier // exchange.page_size), dtype=np.int32) % exchange.n_pages
        ints = np.zeros(buffers.chunk.size, np.int32)
        blocks = np.zeros(1, np.int32)
        buffers.chunk.fill(ints, HostSwap(SwapKind.IN, 0, earlier, blocks, pages))
        fields["chunk"][:] = torch.from_numpy(ints)
        tiles = -(-new // TILE_Q)
        shape = Shape(0, new, 0, to_cpu=True, tiles=tiles, chunk_place=True)
        return self._added(lambda: self._stages.forward([shape]), fields["chunk"][1:2], 0)

    def _storing(self) -> dict[str, list[float]] | None:
        """What K and V of CPU prefills take, per layer: their stores are in line."""
        if self._threads == 0:
            return None
        return self._curve(self._stored, up_to(STORED, self._limits[0]))

    def _stored(self, tokens: int) -> Callable[[], object]:
        """The stores of all layers, less those of tokens that go nowhere."""
        exchange = self._stages.exchange
        assert exchange is not None
        self._blank(tokens)
        fields = self._stages.buffers.channels[0].fields
        at = torch.arange(tokens, device=self._model.device)
        fields["pages"][:tokens] = at // exchange.page_size % exchange.n_pages
        fields["page_rows"][:tokens] = at % exchange.page_size
        shape = Shape(0, tokens, 0, to_cpu=True)

        def run() -> None:
            for layer in range(self._model.config.num_hidden_layers):
                self._stages.store(shape, layer)

        return self._added(run, fields["pages"][:tokens], -1)

    def _added(
        self, call: Callable[[], object], ints: Tensor, nothing: int
    ) -> Callable[[], object]:
        """How much longer a layer of it is in a graph than where ``ints`` say ``nothing``."""
        graph, held = captured(call), ints.clone()

        def added() -> float:
            ints.copy_(held)
            whole = replayed(graph)
            ints.fill_(nothing)
            return max(whole - replayed(graph), 0.0) / self._model.config.num_hidden_layers

        return Measured(added)

    def _transfer(self, tokens: int) -> Callable[[], object]:
        exchange = self._stages.exchange
        if exchange is None:
            return lambda: None
        blocks = np.arange(-(-tokens // self._cache.block_size), dtype=np.int32)
        pages = np.arange(-(-tokens // exchange.page_size), dtype=np.int32)
        blocks, pages = blocks % self._cache.num_blocks, pages % exchange.n_pages
        span = HostSwap(SwapKind.OUT, 0, tokens, blocks, pages)
        layers = len(self._cache.blocks)
        begin, end = Event(), Event()

        def run() -> float:
            begin.record()
            exchange.swap(self._cache.blocks, span)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3 / layers

        return Measured(run)
