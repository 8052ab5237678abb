"""CUDA graphs of iterations: one for each shape of ``gpu_worker.cuda.buckets``."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch

from gpu_worker.cuda.buckets import Buckets, Key
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.graph_memory import graph_bytes
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.stages import Stages
from protos.config import PlanMode

logger = logging.getLogger(__name__)


def buckets_of(buffers: Buffers, max_rows: int, max_tokens: int) -> Buckets:
    """Those of plans within these limits, whose riders have places in ``buffers`` or nowhere."""
    return Buckets(max_rows, max_tokens, buffers.rides.layout.capacity if buffers.rides else 0)


class Graphs:
    """Captured before the first plan; nothing is captured while plans run."""

    def __init__(self, stages: Stages, max_rows: int, max_tokens: int) -> None:
        self._stages = stages
        self._buckets = buckets_of(stages.buffers, max_rows, max_tokens)
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}

    def capture(self, modes: Collection[PlanMode]) -> None:
        """Those of these kinds of plan."""
        keys = sorted(self._buckets.keys(modes), key=lambda key: -sum(s.tokens for s in key))
        begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for key in keys:  # the largest first: the others fit into its memory
            self._stages.forward(key)  # loads and compiles what capturing may not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._stages.forward(key)
            self._graphs[key] = graph
        self._report(time.perf_counter() - begin, free - torch.cuda.mem_get_info()[0])

    def _report(self, seconds: float, taken: int) -> None:
        layers = self._stages.model.config.num_hidden_layers
        expected = graph_bytes(self._graphs, layers)
        logger.info(
            "captured %d CUDA graphs in %.1f s, %.0f MiB; %.0f were estimated",
            *(len(self._graphs), seconds, taken / 2**20, expected / 2**20),
        )
        if taken > expected:
            logger.warning(
                "the graphs took %.0f MiB more than was kept free for them: the device may run out "
                "of memory; if it does, lower --gpu-memory-utilization",
                (taken - expected) / 2**20,
            )

    def key_of(self, plan: HostPlan) -> Key | None:
        """Of the graph that runs this plan's rows, or None where there is none."""
        key = self._buckets.key_of(plan)
        return key if key in self._graphs else None

    def replay(self, key: Key) -> None:
        """Enqueues the graph of ``key_of``."""
        self._graphs[key].replay()
