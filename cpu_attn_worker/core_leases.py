"""Cores for attention threads, leased in the worker table so that no two threads share one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from neo_native import Control, cores

logger = logging.getLogger("cpu_attn_worker")


def lease_cores(control: Control, row: int, threads: int, reserved: int) -> list[int]:
    """One core per thread, or none at all, with a warning, when too few are free.

    Never one of the first `reserved` usable cores. All of one NUMA node if any has enough: workers
    then share a node's memory channels and caches only with their own threads. Rows begin with
    different nodes, so that workers spread.
    """
    allowed = cores.leasable(reserved)
    nodes = cores.by_node(allowed)
    first = row % len(nodes) if nodes else 0
    for group in (*nodes[first:], *nodes[:first], allowed):
        leased: list[int] = []
        for core in group:
            if len(leased) < threads and control.lease_core(core, row):
                leased.append(core)
        if len(leased) == threads:
            return leased
        control.release_cores(row)
    logger.warning(
        "row %d: %d of %d threads found a free core (%d usable, %d reserved); running unpinned",
        row,
        len(leased),
        threads,
        len(cores.usable()),
        reserved,
    )
    return []


@contextmanager
def running_on(leased: list[int]) -> Iterator[None]:
    """Meanwhile the calling thread, and what it starts, runs on these cores; anywhere when empty.

    Memory first touched here lies on their NUMA node.
    """
    before = os.sched_getaffinity(0)
    if leased:
        os.sched_setaffinity(0, leased)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
