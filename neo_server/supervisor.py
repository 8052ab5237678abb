"""Starts, watches, replaces and ends the worker processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import neo_native
import neo_server
from neo_server.errors import WorkerStartError

_log = logging.getLogger(__name__)

_BACKOFF_S = 0.1  # doubles with every death in a row
_BACKOFF_LIMIT_S = 5.0
_HEALTHY_AFTER_S = 10.0  # a child that lived this long died of something new
_GPU_STARTS = 5  # deaths in a row before it was ready; the first start of all has no second try
_CPU_STARTS = 5  # deaths in a row before the server was ready
_LEAVE_S = 10.0  # a drained worker finishes what it claimed
_STOP_S = 5.0
_SWEEP_S = 0.5


class Workers(Protocol):
    """What shared memory tells about the workers (see shared_memory.py)."""

    def row_of(self, pid: int) -> int | None:
        """Worker-table row of a process."""

    def request_drain(self, row: int) -> None:
        """Asks the worker of this row to leave."""

    def clear_dead_rows(self) -> list[int]:
        """Empties the rows whose process is gone (its lock is free)."""

    def gpu_worker_lives(self) -> bool:
        """Whether some process holds the gpu worker's lock."""


@dataclass(eq=False, slots=True)
class Child:
    """One worker process and the task that watches it."""

    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def is_stopped(self) -> bool:
        """A signal has stopped it (state T of proc_pid_stat(5))."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # over
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    async def wait(self) -> int:
        """Its exit status. A pidfd tells without a thread or a SIGCHLD handler."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:  # over, and reaped by whoever looked first
            return self.process.wait()
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(descriptor, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing if it is over."""
        self.process.send_signal(number)


def spawn(command: Sequence[str]) -> Child:
    """Starts a worker by exec. Its own process group keeps the terminal's Ctrl-C from it."""
    # PyTorch's threads sleep between parallel regions: cores are shared with attention workers.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": python_path()}
    return Child(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, env=environment)
    )


def worker_command(module: str, control_address: str, *arguments: str) -> list[str]:
    """Command line of a worker. Packages of workers are not imported, only run.

    ``-P``: a file of the working directory must not take the place of a module.
    """
    return [sys.executable, "-P", "-m", module, "--server", control_address, *arguments]


def python_path() -> str:
    """``PYTHONPATH`` of a worker: it finds the packages where the server found them."""
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    roots = [Path(str(module.__file__)).resolve().parents[1] for module in (neo_server, neo_native)]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [str(root) for root in roots if root not in installed]
    return os.pathsep.join(dict.fromkeys([*ours, *filter(None, given)]))


class Supervisor:
    """The server's children. Owns the targets; the event loop owns it."""

    def __init__(
        self,
        workers: Workers,
        gpu_command: Sequence[str] | None,  # None: the gpu worker is started by hand
        cpu_command: Sequence[str],
        on_gpu_death: Callable[[], None],
        gpu_is_ready: Callable[[], bool],
    ) -> None:
        self._workers = workers
        self._gpu_command = gpu_command
        self._cpu_command = cpu_command
        self._on_gpu_death = on_gpu_death
        self._gpu_is_ready = gpu_is_ready
        self._gpu: Child | None = None
        self._cpu: list[Child] = []
        self._target = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._server_was_ready = False
        self._gpu_hung = False  # so it had been ready
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, cpu_workers: int) -> None:
        """Spawns everything."""
        if self._gpu_command is not None:
            self._spawn(self._run_gpu(self._gpu_command))
        self._spawn(self._sweep())
        self.scale(cpu_workers)

    def server_is_ready(self) -> None:
        """From now on a cpu worker that ends is replaced, however often."""
        self._server_was_ready = True

    @property
    def gpu_worker_is_stopped(self) -> bool:
        """Whether a gpu worker that is a child of this server stands still by a signal."""
        return self._gpu is not None and self._gpu.is_stopped

    def kill_gpu_worker(self) -> None:
        """Ends a gpu worker that hangs, and another follows. Not one that others started."""
        if self._gpu is not None:
            self._gpu_hung = True
            self._gpu.signal(signal.SIGKILL)
        else:
            _log.error("the gpu worker hangs and is no child of this server: it is told to leave")

    def scale(self, cpu_workers: int) -> int:
        """Sets how many cpu workers the server runs itself; returns the previous number."""
        previous, self._target = self._target, cpu_workers
        for _ in range(cpu_workers - previous):
            self._spawn(self._run_cpu())
        leaving = self._cpu[cpu_workers:]
        del self._cpu[cpu_workers:]
        for child in leaving:
            self._spawn(self._retire(child))
        return previous

    async def failure(self) -> None:
        """Never returns; raises ``WorkerStartError`` when a worker cannot be kept alive."""
        await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Ends every child: SIGTERM, then SIGKILL."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [*self._cpu, *([self._gpu] if self._gpu else [])]
        for child in children:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a stopped one could not leave
        await asyncio.gather(*(self._end(child) for child in children))
        self._cpu.clear()
        self._gpu = None
        if not self._failure.done():
            self._failure.cancel()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _run_gpu(self, command: Sequence[str]) -> None:
        deaths, was_ready = 0, False
        while True:
            self._gpu = spawn(command)
            code = await self._gpu.wait()
            is_ready = self._gpu_is_ready() or self._gpu_hung
            was_ready |= is_ready
            deaths = 1 if is_ready else deaths + 1
            self._gpu, self._gpu_hung = None, False
            self._on_gpu_death()
            _log.warning("gpu worker ended with status %d", code)
            if deaths >= _GPU_STARTS or not was_ready:
                raise WorkerStartError(
                    f"the gpu worker ended with status {code} before it was ready"
                )
            await asyncio.sleep(_backoff(deaths))

    async def _run_cpu(self) -> None:
        deaths = 0
        while len(self._cpu) < self._target:
            child = spawn(self._cpu_command)
            self._cpu.append(child)
            code = await child.wait()
            self._workers.clear_dead_rows()
            if child not in self._cpu:  # retired
                return
            self._cpu.remove(child)
            deaths = 1 if time.monotonic() - child.started > _HEALTHY_AFTER_S else deaths + 1
            _log.warning("cpu-attention worker %d ended with status %d", child.pid, code)
            if deaths >= _CPU_STARTS and not self._server_was_ready:
                raise WorkerStartError(
                    f"a cpu-attention worker ended with status {code}, {deaths} times in a row "
                    "before the server was ready"
                )
            await asyncio.sleep(_backoff(deaths))

    async def _retire(self, child: Child) -> None:
        """Scale down: drain by its row, or by signal where it has none yet."""
        row = self._workers.row_of(child.pid)
        if row is None:
            child.signal(signal.SIGTERM)
        else:
            self._workers.request_drain(row)
        try:
            await asyncio.wait_for(child.wait(), _LEAVE_S)
        except TimeoutError:
            _log.warning("cpu-attention worker %d did not leave in %s s", child.pid, _LEAVE_S)
        finally:
            await self._end(child)

    async def _sweep(self) -> None:
        """Rows of dead workers, also of those that others started."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._workers.clear_dead_rows()
            external = self._gpu_command is None
            if external and self._gpu_is_ready() and not self._workers.gpu_worker_lives():
                _log.warning("the gpu worker is gone; waiting for another")
                self._on_gpu_death()

    async def _end(self, child: Child) -> None:
        if child.process.poll() is not None:
            return
        try:
            await asyncio.wait_for(child.wait(), _STOP_S if self._stopping else 0.0)
        except TimeoutError:
            child.signal(signal.SIGKILL)
            await child.wait()


def _backoff(deaths: int) -> float:
    return float(min(_BACKOFF_S * 2 ** (deaths - 1), _BACKOFF_LIMIT_S))
