from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from neo_server import supervisor as module
from neo_server.errors import WorkerStartError
from neo_server.supervisor import Supervisor

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
STUBBORN = [
    *(sys.executable, "-S", "-c"),
    "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)",
]
FAIL = [sys.executable, "-S", "-c", "raise SystemExit(7)"]


@dataclass
class FakeWorkers:
    """A worker table in which every child has its pid as its row."""

    registered: bool = True
    cleared: int = 0
    drained: list[int] = field(default_factory=list)
    gpu_lives: bool = True

    def row_of(self, pid: int) -> int | None:
        return pid if self.registered else None

    def request_drain(self, row: int) -> None:
        self.drained.append(row)
        os.kill(row, signal.SIGTERM)

    def clear_dead_rows(self) -> list[int]:
        self.cleared += 1
        return []

    def gpu_worker_lives(self) -> bool:
        return self.gpu_lives


@dataclass
class Harness:
    supervisor: Supervisor
    workers: FakeWorkers
    gpu_ready: list[bool]
    gpu_deaths: list[float]

    @property
    def cpu_pids(self) -> list[int]:
        return [child.pid for child in self.supervisor._cpu]


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def harness(
    cpu: int, gpu_command: list[str] | None = SLEEP, cpu_command: list[str] = SLEEP
) -> AsyncIterator[Harness]:
    workers, ready, deaths = FakeWorkers(), [False], []

    def on_gpu_death() -> None:
        deaths.append(time.monotonic())
        ready[0] = False

    supervisor = Supervisor(workers, gpu_command, cpu_command, on_gpu_death, lambda: ready[0])
    supervisor.start(cpu)
    made = Harness(supervisor, workers, ready, deaths)
    try:
        yield made
    finally:
        await supervisor.stop()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_dead_cpu_worker_is_replaced_and_rows_are_swept() -> None:
    async with harness(2) as h:
        await until(lambda: len(h.cpu_pids) == 2)
        first, second = h.cpu_pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(h.cpu_pids) == 2 and first not in h.cpu_pids)
        assert second in h.cpu_pids
        assert h.workers.cleared > 0


async def test_scaling_down_drains_the_latest_and_scaling_up_adds() -> None:
    async with harness(1) as h:
        await until(lambda: len(h.cpu_pids) == 1)
        (kept,) = h.cpu_pids
        assert h.supervisor.scale(3) == 1
        await until(lambda: len(h.cpu_pids) == 3)
        leaving = set(h.cpu_pids) - {kept}
        assert h.supervisor.scale(1) == 3
        await until(lambda: set(h.workers.drained) == leaving)
        await until(lambda: all(map(gone, leaving)))
        await asyncio.sleep(0.3)
        assert h.cpu_pids == [kept]


async def test_a_worker_without_a_row_is_told_to_leave_by_signal() -> None:
    async with harness(1) as h:
        h.workers.registered = False
        await until(lambda: len(h.cpu_pids) == 1)
        (pid,) = h.cpu_pids
        h.supervisor.scale(0)
        await until(lambda: gone(pid))
        assert h.workers.drained == []


async def test_a_gpu_worker_that_fails_before_it_was_ready_is_fatal() -> None:
    async with harness(0, gpu_command=FAIL) as h:
        with pytest.raises(WorkerStartError, match="status 7"):
            await asyncio.wait_for(h.supervisor.failure(), 20.0)


async def test_a_gpu_worker_that_was_ready_is_replaced() -> None:
    async with harness(0) as h:
        await until(lambda: h.supervisor._gpu is not None)
        assert h.supervisor._gpu is not None
        pid = h.supervisor._gpu.pid
        h.gpu_ready[0] = True
        os.kill(pid, signal.SIGKILL)
        await until(lambda: h.supervisor._gpu is not None and h.supervisor._gpu.pid != pid)
        assert len(h.gpu_deaths) == 1


async def test_a_gpu_worker_of_others_is_watched_by_its_lock() -> None:
    async with harness(0, gpu_command=None) as h:
        h.gpu_ready[0] = True
        h.workers.gpu_lives = False
        await until(lambda: len(h.gpu_deaths) == 1)


async def test_a_gpu_worker_that_hangs_is_killed_and_replaced() -> None:
    async with harness(0) as h:
        await until(lambda: h.supervisor._gpu is not None)
        assert h.supervisor._gpu is not None
        pid = h.supervisor._gpu.pid
        os.kill(pid, signal.SIGSTOP)
        h.supervisor.kill_gpu_worker()  # it had been ready, and is no more
        await until(lambda: h.supervisor._gpu is not None and h.supervisor._gpu.pid != pid)
        assert gone(pid)
        assert len(h.gpu_deaths) == 1


async def test_cpu_workers_that_cannot_start_end_the_start_with_their_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_S", 0.001)
    async with harness(1, cpu_command=FAIL) as h:
        with pytest.raises(WorkerStartError, match=r"status 7, 5 times in a row"):
            await asyncio.wait_for(h.supervisor.failure(), 20.0)


async def test_cpu_workers_of_a_server_that_was_ready_are_retried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_LIMIT_S", 0.001)
    async with harness(1, cpu_command=FAIL) as h:
        h.supervisor.server_is_ready()
        await until(lambda: h.workers.cleared > 2 * module._CPU_STARTS)
        assert not h.supervisor._failure.done()


async def test_a_worker_that_died_and_was_reaped_before_it_is_retired_is_over() -> None:
    async with harness(1, gpu_command=None) as h:
        await until(lambda: len(h.cpu_pids) == 1)
        (child,) = h.supervisor._cpu
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        h.workers.registered = False
        h.supervisor.scale(0)  # its signal finds the process over, and reaps it
        await until(lambda: gone(child.pid))
        await until(lambda: len(h.supervisor._tasks) == 1)  # the sweep
        assert not h.supervisor._failure.done()
        assert await child.wait() == -signal.SIGKILL


async def test_workers_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpc.py").write_text("raise SystemExit(42)")
    monkeypatch.chdir(tmp_path)
    child = module.spawn(module.worker_command("cpu_attn_worker", "127.0.0.1:1", "--help"))
    assert await child.wait() == 0


async def test_stop_ends_children_that_are_stopped_or_ignore_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_STOP_S", 0.5)
    async with harness(2, cpu_command=STUBBORN) as h:
        await until(lambda: len(h.cpu_pids) == 2 and h.supervisor._gpu is not None)
        assert h.supervisor._gpu is not None
        pids = [*h.cpu_pids, h.supervisor._gpu.pid]
        os.kill(pids[0], signal.SIGSTOP)
    assert all(map(gone, pids))


def test_backoff_doubles_to_its_limit() -> None:
    assert [module._backoff(n) for n in (1, 2, 3, 20)] == [0.1, 0.2, 0.4, 5.0]
