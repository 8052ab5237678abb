"""CUDA graphs of decode iterations: one per token bucket and kind of iteration.

Row kinds, lengths, tables and epochs come from device memory, so that the graph of a bucket serves
any split between GPU- and CPU-requests. Iterations with prefills run the same launches one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.stages import Shape, Stages

logger = logging.getLogger(__name__)

SMALL = (1, 2, 4, 8)
STEP = 8  # between buckets up to 64 rows; then 16 up to 128, then 32
PAIRS = (8, 32, 64, 128, 256)  # buckets of each batch where there are two

Key = tuple[tuple[int, bool], ...]  # by sub-batch: bucket, whether it has CPU rows


def buckets(most: int) -> list[int]:
    """Numbers of rows that have a graph, the last at least ``most``."""
    found = [n for n in SMALL if n <= most]
    while not found or found[-1] < most:
        last = found[-1] if found else 0
        found.append(last + (STEP if last < 64 else 16 if last < 128 else 32))
    return found


def bucket_of(rows: int, among: Sequence[int]) -> int | None:
    """The least bucket that holds ``rows``."""
    return next((n for n in among if n >= rows), None)


class Graphs:
    """Captured before the first plan; nothing is captured while plans run."""

    def __init__(self, stages: Stages, max_rows: int) -> None:
        self._stages = stages
        self._max_rows = max_rows
        self._buckets = buckets(max_rows)
        self._pairs = [n for n in PAIRS if n <= self._buckets[-1]]
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}

    def capture(self, offload: bool, pairs: bool) -> None:
        """``offload``: also with CPU rows; ``pairs``: also two sub-batches."""
        keys: list[Key] = [((n, False),) for n in self._buckets]
        if offload:
            keys += [((n, True),) for n in self._buckets]
        if offload and pairs:
            keys += [((a, True), (b, True)) for a in self._pairs for b in self._pairs]
        begin, before = time.perf_counter(), torch.cuda.memory_reserved()
        free_before = torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for key in reversed(keys):  # the largest first: the others fit into its memory
            shapes = self._shapes(key)
            self._stages.forward(shapes)  # loads and tunes what capturing may not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._stages.forward(shapes)
            self._graphs[key] = graph
        grown = free_before - torch.cuda.mem_get_info()[0]
        logger.info(
            "captured %d CUDA graphs in %.1f s, %.0f MiB (%.0f MiB of them PyTorch's)",
            len(keys),
            time.perf_counter() - begin,
            grown / 2**20,
            (torch.cuda.memory_reserved() - before) / 2**20,
        )

    def _shapes(self, key: Key) -> list[Shape]:
        return [
            Shape(
                channel=channel,
                tokens=n,
                gpu_rows=n,
                cpu_rows=n if has_cpu else 0,
                to_cpu=has_cpu,
                sampled=n,
            )
            for channel, (n, has_cpu) in enumerate(key)
        ]

    def find(self, plan: HostPlan) -> torch.cuda.CUDAGraph | None:
        """The graph that runs this plan's rows, or None: it has prefills, or was not captured."""
        if not all(b.decodes_only and b.n_sampled == b.n_tokens for b in plan.batches):
            return None
        if [b.channel for b in plan.batches] != list(range(len(plan.batches))):
            return None
        one = len(plan.batches) == 1
        among = self._buckets if one else self._pairs
        key = []
        for batch in plan.batches:
            bucket = bucket_of(batch.n_tokens, among)
            if bucket is None:
                return None
            key.append((bucket, bool(batch.n_cpu_rows) or not one))
        return self._graphs.get(tuple(key))
