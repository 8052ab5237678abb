"""Measures what each stage of an iteration costs on this machine: the server's cost model.

At most 60 points and 20 seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from gpu_worker.batch import CpuDecodes
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel
from gpu_worker.offload import Offload
from gpu_worker.progress import progress

logger = logging.getLogger(__name__)

BUDGET_S = 20.0
SLOWEST_S = 0.4  # a stage's next, larger point is left out when one call took this long
REPEATS = 5
WORKERS_WAIT_S = 5.0
POINT_S = 0.15  # spent on one point, unless a single call takes longer
TOKENS = 1 << 20  # of K and V that a measurement of CPU attention reads, unless a layer has more
LEAST_S = 1e-6  # of CPU attention

LINEAR = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
PREFILL = (16, 64, 256, 512, 1024)
ROWS = (1, 4, 16, 64)
LENGTHS = (64, 512, 2048)
HANDOFF = (1, 16, 64)
TRANSFER = (16, 256)
HEAD = (1, 16, 64)


@dataclass(frozen=True)
class Measured:
    """A call that returns the seconds asked for."""

    call: Callable[[], float]

    def __call__(self) -> float:
        """Once."""
        return self.call()


@dataclass(frozen=True)
class RoundTrip:
    """Seconds of a layer of CPU decodes, from the stores of K and V to O."""

    seconds: float
    waited_s: float  # of these, for the cpu workers

    @property
    def own_s(self) -> float:
        """The device's part: its stores, its signals, its reading of O."""
        return max(self.seconds - self.waited_s, 0.0)


class Profiler:
    """One model on one device, before any plan runs."""

    overlaps_transfers = False  # swaps come before the iteration, in line

    def __init__(
        self,
        model: LlamaModel,
        cache: GpuCache,
        offload: Offload,
        max_tokens: int,
        max_rows: int,
        max_length: int,
    ) -> None:
        """``max_length``: tokens that a slot of the CPU-cache has room for."""
        self._model = model
        self._cache = cache
        self._offload = offload
        self._limits = max_tokens, max_rows, max_length
        self._layer = min(1, model.config.num_hidden_layers - 1)
        self._deadline = 0.0
        self._threads = 0
        self._handoffs: dict[str, list[float]] = {}

    @torch.inference_mode()
    def run(self, threads: int) -> dict[str, Any]:
        """The table; ``threads`` cpu-attention threads live, 0: no CPU attention in it."""
        begin = time.perf_counter()
        self._deadline = begin + BUDGET_S
        self._threads = threads
        seconds = self._stages_table()
        logger.info("profiled in %.1f s", time.perf_counter() - begin)
        return seconds

    def _stages_table(self) -> dict[str, Any]:
        tokens, rows, length = self._limits
        grid, moved = (up_to(ROWS, rows), up_to(LENGTHS, length)), min(tokens, length)
        stages: dict[str, Callable[[], dict[str, Any] | None]] = {
            "linear": lambda: self._curve(self._linear, up_to(LINEAR, tokens)),
            "head": lambda: self._curve(self._head, up_to(HEAD, rows)),
            "prefill_attn": lambda: self._prefill(up_to(PREFILL, tokens)),
            "handoff": lambda: self._handoff_curve(up_to(HANDOFF, rows)),
            "ride_handoff": self._ride_handoff,
            "staging": self._staging,
            "storing": self._storing,
            "transfer": lambda: self._curve(self._transfer, up_to(TRANSFER, moved)),
            "gpu_attn": lambda: self._surface(self._gpu_attn, *grid),
            "cpu_attn": lambda: self._cpu_surface(*grid),  # behind ``handoff``, which it is less
        }
        table: dict[str, Any] = {
            "num_layers": self._model.config.num_hidden_layers,
            "overlaps_transfers": self.overlaps_transfers,
        }
        with progress("profiling stages", len(stages)) as advance:
            for name, measure in stages.items():
                table[name] = measure()
                advance()
        return table

    def _time(self, call: Callable[[], object]) -> float:
        """Median seconds of a call, once warm."""
        seconds = call if isinstance(call, Measured) else Measured(lambda: self._seconds(call))
        seconds()
        spent: list[float] = []
        stop = min(time.perf_counter() + POINT_S, self._deadline)
        while len(spent) < REPEATS and (not spent or time.perf_counter() < stop):
            spent.append(seconds())
        return median(spent)

    def _seconds(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _curve(
        self, make: Callable[[int], Callable[[], object]], xs: Sequence[int]
    ) -> dict[str, list[float]]:
        points: dict[str, list[float]] = {"x": [], "seconds": []}
        for x in xs:
            if points["x"] and (
                points["seconds"][-1] > SLOWEST_S or time.perf_counter() > self._deadline
            ):
                break
            points["x"].append(float(x))
            points["seconds"].append(self._time(make(x)))
        return points

    def _surface(
        self,
        make: Callable[[int, int], Callable[[], object]],
        rows: Sequence[int],
        lengths: Sequence[int],
        layers: Callable[[int, int], int] = lambda *_: 1,
    ) -> dict[str, Any]:
        """``layers``: that one call goes through."""
        table = [[0.0] * len(lengths) for _ in rows]
        for i, count in enumerate(rows):
            for j, length in enumerate(lengths):
                earlier = table[i - 1][j] if i else table[i][j - 1] if j else 0.0
                grown = (
                    count * length / max(rows[i - 1] * length if i else count * lengths[j - 1], 1)
                )
                slowest = SLOWEST_S / layers(count, length)
                if earlier * grown > slowest or time.perf_counter() > self._deadline:
                    table[i][j] = earlier * grown  # what is too slow to measure is proportional
                else:
                    table[i][j] = self._time(make(count, length))
        return {"rows": list(rows), "tokens_per_row": list(lengths), "seconds": table}

    def _linear(self, tokens: int) -> Callable[[], object]:
        ids = torch.zeros(tokens, dtype=torch.int64, device=self._model.device)
        x = self._model.embed(ids, ids)
        x.residual.normal_()  # a device multiplies zeros faster: they take less power
        x.attn.normal_()
        return lambda: self._model.linear_stage(x, self._layer)

    def _head(self, rows: int) -> Callable[[], object]:
        ids = torch.zeros(rows, dtype=torch.int64, device=self._model.device)

        def run() -> object:
            x = self._model.embed(ids, ids)
            return self._model.logits(x.residual).argmax(dim=-1).cpu()

        return run

    def _prefill(self, sizes: Sequence[int]) -> dict[str, list[float]]:
        points = self._curve(self._prefill_attn, sizes)
        points["x"] = [n * (n + 1) / 2 for n in points["x"]]
        return points

    def _prefill_attn(self, tokens: int) -> Callable[[], object]:
        config = self._model.config
        q, k, v = (
            torch.randn((tokens, heads, config.head_dim), device=self._model.device).to(
                self._model.dtype
            )
            for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        )
        scale = config.attention_scale
        return lambda: self._model.ops.prefill_attention(q, k, v, None, scale)

    def _gpu_attn(self, rows: int, length: int) -> Callable[[], object]:
        config, size = self._model.config, self._cache.block_size
        columns = -(-length // size)
        blocks = np.random.default_rng(0).integers(0, self._cache.num_blocks, (rows, columns))
        table = torch.from_numpy(blocks).to(self._model.device)
        mask = torch.ones((rows, 1, 1, columns * size), dtype=torch.bool, device=table.device)
        q = self._rows(rows, config.num_attention_heads)
        k, v = self._cache.layer(0)
        scale = config.attention_scale
        return lambda: self._model.ops.decode_attention(q, k, v, table, mask, scale)

    def _rows(self, rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, self._model.config.head_dim)
        return torch.randn(shape, device=self._model.device).to(self._model.dtype)

    def _handoff_curve(self, rows: Sequence[int]) -> dict[str, list[float]]:
        try:
            self._handoffs = self._curve(self._handoff, rows)
        except TimeoutError as error:
            self._do_without_cpu(error)
            self._handoffs = self._curve(self._handoff, rows)
        return self._handoffs

    def _cpu_surface(self, rows: Sequence[int], lengths: Sequence[int]) -> dict[str, Any] | None:
        if self._threads == 0:
            return None
        try:
            return self._surface(self._cpu_attn, rows, lengths, self._layers)
        except TimeoutError as error:
            self._do_without_cpu(error)
            return None

    def _do_without_cpu(self, error: TimeoutError) -> None:
        logger.warning("what CPU attention costs is not known: %s", error)
        self._threads = 0

    def _handoff(self, rows: int) -> Callable[[], object]:
        """Storing, publishing and collecting, per layer, without the wait in between."""
        if self._threads == 0:
            return Measured(lambda: 0.0)
        run = self._offloaded(rows, 1)
        return Measured(lambda: run().own_s)

    def _cpu_attn(self, rows: int, length: int) -> Callable[[], object]:
        """From the hand-off's signal to the cpu workers' answer: the rest of the round trip."""
        run = self._offloaded(rows, length)
        handoff = float(np.interp(rows, self._handoffs["x"], self._handoffs["seconds"]))
        return Measured(lambda: max(run().seconds - handoff, LEAST_S))

    def _layers(self, rows: int, length: int) -> int:
        """That such rows are measured in, each with K and V of its own as in a plan."""
        return min(self._model.config.num_hidden_layers, max(TOKENS // (rows * length), 1))

    def _offloaded(self, rows: int, length: int) -> Callable[[], RoundTrip]:
        """Through the layers of a plan, from the stores of CPU-requests to their O.

        ``length``: tokens that each of the ``rows`` attends to. Raises ``TimeoutError`` where the
        cpu workers do not do their part.
        """
        config, layers = self._model.config, self._layers(rows, length)
        k = self._rows(rows, config.num_key_value_heads)
        q = self._rows(rows, config.num_attention_heads)
        out = torch.empty_like(q)
        slots, lengths = np.arange(rows, dtype=np.uint32), np.full(rows, length, np.uint32)
        decodes = CpuDecodes(slice(0, rows), slots, lengths - 1)

        def run() -> RoundTrip:
            begin, waited = time.perf_counter(), 0.0
            with self._offload.trial(slots, lengths):
                for layer in range(layers):
                    self._offload.store_rows(layer, decodes, k, k)
                    self._offload.publish(0, layer, q)
                    published = time.perf_counter()
                    if not self._offload.wait(0):
                        raise TimeoutError("the cpu workers did not do their part")
                    waited += time.perf_counter() - published
                    self._offload.collect(0, out)
            return RoundTrip((time.perf_counter() - begin) / layers, waited / layers)

        return run

    def _ride_handoff(self) -> dict[str, list[float]] | None:
        """None: a group of riders costs what a sub-batch's CPU rows do."""
        return None

    def _staging(self) -> dict[str, list[float]] | None:
        """None: later chunks of CPU prefills wait for a copy of what is before them."""
        return None

    def _storing(self) -> dict[str, list[float]] | None:
        """None: a copy brings what CPU prefills leave to the CPU-cache."""
        return None

    def _transfer(self, tokens: int) -> Callable[[], object]:
        k = self._rows(tokens, self._model.config.num_key_value_heads)
        return lambda: self._offload.store_span(0, 0, 0, k, k)


def up_to(sizes: Sequence[int], limit: int) -> list[int]:
    """Those below the limit, and the limit itself if it is among or below them."""
    inside = [size for size in sizes if size <= limit]
    if not inside or (inside[-1] < limit and len(inside) < len(sizes)):
        inside.append(limit)
    return inside
