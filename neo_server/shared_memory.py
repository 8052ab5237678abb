"""The server's segments: created, locked, watched and unlinked here."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from neo_native import (
    Control,
    ResultConsumer,
    Sequences,
    StepProducer,
    cores,
    make_geometry,
    segments,
)
from neo_server.cpu_pool import CpuPool

_log = logging.getLogger(__name__)

_POPULATE_THREADS = 8  # that give new segments their memory


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A filled row of the worker table."""

    row: int
    pid: int
    num_threads: int
    tasks: int
    busy_s: float
    kv_bytes_read: int
    heartbeat_ns: int  # CLOCK_MONOTONIC, when the counters were written


class SharedMemory:
    """All segments of this instance. Closing it removes their names."""

    def __init__(self, fields: dict[str, int], shm_dir: str | None) -> None:
        for instance in segments.reclaim_dead(shm_dir):
            _log.info("reclaimed the segments of instance %s, whose server is dead", instance)
        threads = min(_POPULATE_THREADS, len(cores.usable()))
        self._segments = segments.create_all(
            make_geometry(**fields), shm_dir=shm_dir, populate_threads=threads
        )
        geometry = self._segments.geometry
        self._control = Control(self._segments.control)
        self.cpu_pool = CpuPool(self._control.worker_rows)
        self.sequences = Sequences(self._segments.sequences, geometry)
        # Until sequences come, slots name all pages in turn: a profile then reads real memory.
        pages = np.arange(self.sequences.page_table.size, dtype=np.uint32)
        pages %= max(int(geometry["n_pages"]), 1)
        self.sequences.page_table[:] = pages.reshape(self.sequences.page_table.shape)
        self.producer = StepProducer(self._segments.steps, geometry)
        self.consumer = ResultConsumer(self._segments.results, geometry)

    @property
    def location(self) -> segments.Location:
        """Where workers find the segments."""
        return self._segments.location

    @property
    def max_workers(self) -> int:
        """Rows of the worker table."""
        return int(self._segments.geometry["max_workers"])

    def workers(self) -> list[WorkerEntry]:
        """Cpu-attention workers that have a row."""
        table = self._control.worker_rows()
        return [
            WorkerEntry(
                row=int(row),
                pid=int(entry["pid"]),
                num_threads=int(entry["n_threads"]),
                tasks=int(entry["tasks"]),
                busy_s=float(entry["busy_ns"]) * 1e-9,
                kv_bytes_read=int(entry["kv_bytes"]),
                heartbeat_ns=int(entry["heartbeat_ns"]),
            )
            for row in np.flatnonzero(table["state"])
            for entry in (table[row],)
        ]

    def row_of(self, pid: int) -> int | None:
        """Worker-table row of a child; the pids of other containers are not ours."""
        table = self._control.worker_rows()
        ours = (table["state"] != 0) & (table["spawned"] == 1) & (table["pid"] == pid)
        return int(ours.argmax()) if ours.any() else None

    def request_drain(self, row: int) -> None:
        """Asks the worker of this row to leave."""
        self._control.request_drain(row)

    def clear_dead_rows(self) -> list[int]:
        """Empties the rows whose process is gone."""
        return segments.clear_dead_workers(self._segments, self._control)

    def gpu_worker_lives(self) -> bool:
        """Whether some process holds the gpu worker's lock."""
        return self._segments.is_locked(segments.gpu_worker_byte(0))

    def give_up_gpu_worker(self) -> None:
        """Asks a gpu worker that hangs to leave should it wake up: it may be nobody's child."""
        self._segments.try_lock(segments.gpu_given_up_byte(0))

    def expect_gpu_worker(self) -> None:
        """Another one registers: it stays."""
        segments.unlock(self._segments.fd, segments.gpu_given_up_byte(0))

    def clear_plans(self) -> None:
        """No plan is in flight unless a gpu worker lives: cpu workers spin for none then."""
        if not self.gpu_worker_lives():
            self._control.clear_plans()

    def set_stopping(self) -> None:
        """Every worker leaves."""
        self._control.set_stopping()

    def close(self) -> None:
        """Removes the names, then gives up the lock that says that this server lives."""
        segments.unlink_all(self._segments)
        self._segments.close()
