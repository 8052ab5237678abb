"""CUDA graphs of iterations: one for each shape of ``gpu_worker.cuda.buckets``."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch

from gpu_worker.cuda.buckets import Buckets, Key
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.stages import Stages
from protos.config import PlanMode

logger = logging.getLogger(__name__)


class Graphs:
    """Captured before the first plan; nothing is captured while plans run."""

    def __init__(self, stages: Stages, max_rows: int, max_tokens: int) -> None:
        rides = stages.buffers.rides
        self._stages = stages
        self._buckets = Buckets(max_rows, max_tokens, rides.layout.capacity if rides else 0)
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
        grown = free - torch.cuda.mem_get_info()[0]
        spent = time.perf_counter() - begin
        logger.info("captured %d CUDA graphs in %.1f s, %.0f MiB", len(keys), spent, grown / 2**20)

    def find(self, plan: HostPlan) -> torch.cuda.CUDAGraph | None:
        """The graph that runs this plan's rows, or None where there is none."""
        key = self._buckets.key_of(plan)
        return self._graphs.get(key) if key else None
