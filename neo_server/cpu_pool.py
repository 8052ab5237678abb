"""Which cpu-attention workers the scheduler may count on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_READY = 2  # WorkerState of protos/wire.hpp
_RETRY_S = 1.0  # doubles with every plan that is voided before a task is done
_RETRY_LIMIT_S = 60.0
_SILENT_S = 3.0  # fifteen heartbeats: a worker that shows none is stopped or gone

Table = npt.NDArray[Any]  # of worker_row_dtype


class CpuPool:
    """Counts workers; after a plan lost its CPU rows, only those that show life.

    A stopped process keeps its row and its lock. If every worker is stopped, each plan with CPU
    rows takes cpu_attn_timeout_s, and GPU-requests would wait with it.
    """

    def __init__(
        self, table: Callable[[], Table], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._clock = clock
        self._voided: Table | None = None  # the table when the last plan was voided
        self._voids = 0  # in a row
        self._retry_at = 0.0

    def note_void(self) -> None:
        """CPU rows of a plan were given up."""
        self._voided = self._table().copy()
        self._voids += 1
        pause = min(_RETRY_S * 2.0 ** min(self._voids - 1, 16), _RETRY_LIMIT_S)
        self._retry_at = self._clock() + pause

    def live_workers(self) -> int:
        """Workers that are ready, stay, and are not known to have stopped.

        After a void there are none before one of them has done a task, or has come since. A pool
        that wakes up has no task to do, so after a pause those with a newer heartbeat count too.
        """
        table = self._table()
        ready = _ready(table)
        if self._voided is not None:
            before = self._voided
            # Another process counts from 0; its id may be the same in another container.
            works = (table["pid"] != before["pid"]) | (table["tasks"] != before["tasks"])
            if (ready & works).any():
                self._voided, self._voids = None, 0
            elif self._clock() < self._retry_at:
                return 0
            else:
                ready &= table["heartbeat_ns"] > before["heartbeat_ns"]
        return int(np.count_nonzero(ready))

    def beating_workers(self) -> int:
        """Workers that are ready, stay, and have shown a heartbeat lately."""
        table = self._table()
        since = (self._clock() - _SILENT_S) * 1e9
        return int(np.count_nonzero(_ready(table) & (table["heartbeat_ns"] > since)))

    def live_threads(self) -> int:
        """Attention threads of the workers that are ready and stay."""
        table = self._table()
        return int(table["n_threads"][_ready(table)].sum())


def _ready(table: Table) -> npt.NDArray[np.bool_]:
    ready: npt.NDArray[np.bool_] = (table["state"] == _READY) & (table["draining"] == 0)
    return ready
