"""What the cpu-attention workers did between two moments, by the worker table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from neo_server.shared_memory import SharedMemory, WorkerEntry

_POLL_S = 0.02
_HEARTBEAT_WAIT_S = 2.0  # ten heartbeats: a worker that shows none is stopped or gone


@dataclass(frozen=True, slots=True)
class CpuWork:
    """Sums over the workers that were there at the end."""

    threads: int
    busy_s: float  # thread time inside the kernels
    kv_bytes: int  # of K and V read


async def fresh_entries(memory: SharedMemory) -> list[WorkerEntry]:
    """The workers' rows, once each has written its counters after this call."""
    now = time.monotonic_ns()
    deadline = time.monotonic() + _HEARTBEAT_WAIT_S
    while True:
        entries = memory.workers()
        fresh = all(entry.heartbeat_ns > now for entry in entries)
        if fresh or time.monotonic() > deadline:
            return entries
        await asyncio.sleep(_POLL_S)


def work_between(before: Sequence[WorkerEntry], after: Sequence[WorkerEntry]) -> CpuWork:
    """Counters only grow; a process that came meanwhile started at zero."""
    known = {(entry.row, entry.pid): entry for entry in before}
    busy_s, kv_bytes = 0.0, 0
    for entry in after:
        start = known.get((entry.row, entry.pid))
        busy_s += entry.busy_s - (start.busy_s if start else 0.0)
        kv_bytes += entry.kv_bytes_read - (start.kv_bytes_read if start else 0)
    return CpuWork(sum(entry.num_threads for entry in after), busy_s, kv_bytes)
