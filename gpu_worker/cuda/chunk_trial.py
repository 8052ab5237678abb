"""What a chunk of a prefill adds to an iteration, and what copies between the caches reach.

For ``scripts/bench_gpu_iterations.py``, on kernels as plans launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
import triton

from gpu_worker.cuda.buckets import Buckets, Key
from gpu_worker.cuda.events import Event, graph_seconds
from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.ride_trial import captured
from gpu_worker.cuda.spans import HostSwap, SpanTable, span_table
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.streams import Lane
from gpu_worker.cuda.tiles import CopyTiles, copy_tiles
from neo_native import RowKind, SwapKind
from protos.model_config import ModelConfig

REPEATS = 5
COPIES = 4  # that are timed at a time
MARGIN = 3  # what runs beside lasts so many times as long, or it would end first
LANES = {SwapKind.OUT: Lane.OUT, SwapKind.IN: Lane.IN}
PLACES = {"gpu": RowKind.PREFILL_GPU, "cpu": RowKind.PREFILL_CPU}

PlanRow = tuple[int, RowKind, int, int]  # slot, kind, start, new tokens
Line = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Sizes to try; none: those of ``tiles.py``."""

    programs: tuple[int, ...] = ()
    kib: tuple[int, ...] = ()  # under way of a program
    warps: tuple[int, ...] = ()
    prefill_tiles: tuple[tuple[int, int, int], ...] = ()  # tokens a step, warps, stages

    def copies(self, exchange: DeviceExchange, config: ModelConfig) -> list[CopyTiles]:
        """What is in use, then each combination."""
        dim_pad = triton.next_power_of_2(config.head_dim)
        now, itemsize = exchange.copy_tiles, exchange.tiles.dtype.itemsize
        sizes = dim_pad, itemsize, exchange.page_size, config.num_key_value_heads
        kib = self.kib or (now.rows * now.tiles * dim_pad * itemsize // 1024,)
        made = [
            copy_tiles(*sizes, programs, under_way * 1024, warps)
            for programs in self.programs or (now.programs,)
            for under_way in kib
            for warps in self.warps or (now.warps,)
        ]
        return list(dict.fromkeys((now, *made)))


class ChunkTrial:
    """Iterations of some decodes and one chunk, from graphs that are captured here."""

    def __init__(
        self,
        stages: Stages,
        read: Callable[[list[PlanRow]], HostPlan],
        limits: tuple[int, int],
        decodes: int,
        context: int,
    ) -> None:
        """``read``: a plan of one batch. ``limits``: most rows and tokens of a plan."""
        self._stages = stages
        self._read = read
        self._buckets = Buckets(*limits)
        self._decodes = decodes
        self._rows = [(slot, RowKind.DECODE_GPU, context, 1) for slot in range(decodes)]
        self._config = stages.model.config

    def chunks(
        self,
        sizes: Sequence[int],
        earlier: Sequence[int],
        places: Sequence[str],
        sweep: Sweep | None = None,
    ) -> Iterator[Line]:
        """Decodes alone, then one line for each chunk; with a sweep, one for each of its sizes."""
        alone = self._iteration(self._plan([])) * 1e3
        yield {"decodes": self._decodes, "device_ms": alone}
        layers = self._config.num_hidden_layers
        for new, start, place in product(sizes, earlier, places):
            key = self._plan([(self._decodes, PLACES[place], start, new)])
            head = {"decodes": self._decodes, "chunk": new, "earlier": start, "place": place}
            copied = start > 0 and place == "cpu"  # what is earlier, in every layer
            lines = self._swept(key, copied, sweep) if sweep else [self._chunk(key, copied)]
            for found in lines:
                added = (found["device_ms"] - alone) * 1e3 / layers
                yield head | found | {"added_us_per_layer": added}

    def _chunk(self, key: Key, copied: bool) -> Line:
        """The iteration whose metadata is in place."""
        line = {"device_ms": self._iteration(key) * 1e3, "attention_us": self._attention(key) * 1e6}
        if copied:
            line["uncopied_ms"] = self._uncopied(key) * 1e3
        return line

    def _swept(self, key: Key, copied: bool, sweep: Sweep) -> Iterator[Line]:
        for tiles in sweep.prefill_tiles:
            stages = self._stages
            with using(stages, "prefill_tiles", tiles), using(stages, "mixed_tiles", tiles):
                us, ms = self._attention(key) * 1e6, self._iteration(key) * 1e3
            yield {"prefill_tiles": tiles, "attention_us": us, "device_ms": ms}
        exchange = self._stages.exchange
        if copied and exchange is not None:
            for copies in sweep.copies(exchange, self._config)[1:]:
                with using(exchange, "copy_tiles", copies):
                    yield asdict(copies) | {"device_ms": self._iteration(key) * 1e3}

    def _uncopied(self, key: Key) -> float:
        """The same iteration whose copies find no tokens."""
        n_tokens = self._stages.buffers.channels[0].fields["chunk"][1:2]
        held = n_tokens.clone()
        n_tokens.zero_()
        try:
            return self._iteration(key)
        finally:
            n_tokens.copy_(held)

    def _plan(self, prefills: list[PlanRow]) -> Key:
        """Puts the metadata where kernels look for it; returns the shape of the plan's graph."""
        plan = self._read(prefills + self._rows)
        (batch,) = plan.batches
        key = self._buckets.key_of(plan)
        if key is None:
            raise ValueError(f"no graph runs {prefills} beside {self._decodes} decodes")
        self._stages.buffers.blank()
        meta = self._stages.buffers.channels[batch.channel].meta
        meta[: batch.used].copy_(torch.from_numpy(batch.meta[: batch.used]))
        # As beside riders: without places for rows that wait for the cpu workers.
        return tuple(replace(shape, cpu_rows=0) for shape in key)

    def _iteration(self, key: Key) -> float:
        """Seconds on the device."""
        return graph_seconds(lambda: self._stages.forward(key), REPEATS)

    def _attention(self, key: Key) -> float:
        """Seconds of one layer's prefill attention alone, which plans without decodes launch."""
        (shape,) = key
        stages = self._stages
        kv = stages.cache.blocks[0]
        staging = stages.buffers.staging[0] if stages.exchange else kv
        tiles = range(shape.tiles)
        return graph_seconds(lambda: stages.prefill(shape, kv, staging, tiles), REPEATS)

    def copies(self, tokens: Sequence[int], sweep: Sweep) -> Iterator[Line]:
        """GB/s of either direction, alone and beside decodes, and what these take meanwhile."""
        exchange = self._stages.exchange
        if exchange is None:
            return
        key = self._plan([])
        graph = captured(lambda: self._stages.forward(key))
        decode = Work(graph.replay, Lane.COMPUTE)
        for tiles in sweep.copies(exchange, self._config):
            with using(exchange, "copy_tiles", tiles):
                for n in tokens:
                    for kind, lane in LANES.items():
                        copy = Work(self._copy(exchange, n, kind), lane)
                        line = {"copy": kind.name.lower(), "tokens": n} | asdict(tiles)
                        yield line | self._beside(exchange, copy, self._bytes(n), decode)

    def _beside(self, exchange: DeviceExchange, copy: Work, size: int, decode: Work) -> Line:
        streams = exchange.streams
        copying, decoding = (work.seconds(streams, COPIES) for work in (copy, decode))
        decodes = MARGIN * -(-COPIES * copying // decoding)
        copying_beside = copy.seconds(streams, COPIES, decode, int(decodes) + 1)
        copies = MARGIN * -(-COPIES * decoding // copying)
        decoding_beside = decode.seconds(streams, COPIES, copy, int(copies) + 1)
        return {
            "gb_per_s": size / copying / 1e9, "beside_gb_per_s": size / copying_beside / 1e9,
            "decode_ms": decoding * 1e3, "decode_beside_ms": decoding_beside * 1e3,
        }  # fmt: skip

    def _copy(self, exchange: DeviceExchange, tokens: int, kind: SwapKind) -> Callable[[], None]:
        """Launches a copy of so many tokens, all layers."""
        cache = self._stages.cache.blocks
        n_blocks, block_size = cache.shape[2], cache.shape[3]
        blocks = np.random.default_rng(0).permutation(n_blocks)[: -(-tokens // block_size)]
        pages = np.arange(-(-tokens // exchange.page_size)) % exchange.n_pages
        if len(blocks) * block_size < tokens:
            raise ValueError(f"{tokens} tokens do not fit a GPU-cache of {n_blocks} blocks")
        span = HostSwap(kind, 0, tokens, blocks.astype(np.int32), pages.astype(np.int32))
        made = span_table([span], exchange.copy_tiles.rows)
        table: SpanTable = made.on(torch.from_numpy(made.ints).to(cache.device))
        layers = range(len(cache))
        return lambda: exchange.copy_pages(cache, layers, table, table.groups[0], kind)

    def _bytes(self, tokens: int) -> int:
        """Through PCIe, scales too."""
        config, exchange = self._config, self._stages.exchange
        assert exchange is not None
        row = config.head_dim * exchange.tiles.dtype.itemsize + 4 * exchange.is_int8
        return tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * row


@dataclass(frozen=True)
class Work:
    """What is launched on a lane."""

    launch: Callable[[], object]
    lane: Lane

    def seconds(
        self, streams: Any, times: int, beside: Work | None = None, beside_times: int = 0
    ) -> float:
        """Of one of so many in a row. ``beside``: begins before, and must last until they end."""
        self.launch_on(streams, 1)  # loads and compiles
        if beside is not None:
            beside.launch_on(streams, 1)
        torch.cuda.synchronize()
        if beside is not None:
            beside.launch_on(streams, beside_times)
        begin, end = Event(), Event()
        with streams.on(self.lane):
            begin.record()
            for _ in range(times):
                self.launch()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3 / times

    def launch_on(self, streams: Any, times: int) -> None:
        """On the lane, one behind the other."""
        with streams.on(self.lane):
            for _ in range(times):
                self.launch()


@contextmanager
def using(of: Stages | DeviceExchange, name: str, sizes: object) -> Iterator[None]:
    """Other sizes for what is launched or captured meanwhile."""
    before = getattr(of, name)
    setattr(of, name, sizes)
    try:
        yield
    finally:
        setattr(of, name, before)
