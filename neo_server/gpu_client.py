"""The server's end of the rings to the gpu worker."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from neo_server.errors import GpuWorkerDiedError, GpuWorkerHungError
from neo_server.plan import Mode
from neo_server.sampling import TokenLogprobs
from neo_server.step import UNKNOWN_TOKEN, RowLogprobs, StageTimes, Step, StepResult
from neo_server.table_cost import ProfileTable

if TYPE_CHECKING:
    from neo_native import ResultConsumer, ResultSlot, StepProducer, StepSlot

_WAIT_SLICE_S = 0.1  # how soon a lost worker is noticed; costs nothing while no plan is in flight
_LATE = 1 / 8  # of the plan timeout: 10 s on CUDA with the defaults


class GpuLink(Protocol):
    """What the engine needs of a gpu worker."""

    async def execute(self, step: Step) -> StepResult:
        """Sends a plan and waits for its result. Raises ``GpuWorkerDiedError``."""

    async def recovered(self) -> int:
        """Waits for a worker with empty caches; returns its number of GPU blocks."""


class GpuClient:
    """Sends plans and receives results; knows whether a worker lives at the other end."""

    def __init__(
        self,
        producer: StepProducer,
        consumer: ResultConsumer,
        on_change: Callable[[bool], None] = lambda _ready: None,
        on_hang: Callable[[], None] = lambda: None,
        plan_timeout_s: float = math.inf,
    ) -> None:
        self.on_change = on_change  # called with is_ready
        self.on_hang = on_hang  # called when a plan is not answered in time
        self.num_gpu_blocks = 0
        self.device = ""
        self.table: ProfileTable | None = None
        self.modes: frozenset[Mode] = frozenset()
        self.pid = 0
        self.waited_s = 0.0  # for the answer that is being waited for
        self._plan_timeout_s = plan_timeout_s
        self._producer = producer
        self._consumer = consumer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="results")
        self._receiving: asyncio.Future[StepResult] | None = None
        self._ready = asyncio.Event()
        self._lost = True  # until the engine has taken note of the worker that is ready

    @property
    def is_ready(self) -> bool:
        """A worker has loaded the model and lives."""
        return self._ready.is_set()

    @property
    def is_late(self) -> bool:
        """A plan has not been answered for a large part of the time after which it is given up."""
        return self.waited_s > _LATE * self._plan_timeout_s

    async def prepare(self, pid: int) -> None:
        """Empties the rings for a worker that registers; no other may live."""
        self.mark_dead()
        if self._receiving is not None:
            with contextlib.suppress(GpuWorkerDiedError, asyncio.CancelledError):
                await asyncio.shield(self._receiving)
        self._producer.reset(takeover=True)  # the worker's lock was free when this one registered
        self._consumer.reset()
        self.pid = pid

    def report_ready(
        self,
        num_gpu_blocks: int,
        device: str,
        table: ProfileTable | None = None,
        modes: frozenset[Mode] = frozenset(),
    ) -> None:
        """The worker has loaded the model; ``modes``: kinds of plan that it runs."""
        self.table = table
        self.modes = modes
        self.num_gpu_blocks = num_gpu_blocks
        self.device = device
        self._ready.set()
        self.on_change(True)

    def mark_dead(self) -> None:
        """The worker is gone; whoever waits for its result is told."""
        self._lost = True
        if self._ready.is_set():
            self._ready.clear()
            self.on_change(False)

    async def recovered(self) -> int:
        """Waits for a worker with empty caches; returns its number of GPU blocks."""
        await self._ready.wait()
        self._lost = False
        return self.num_gpu_blocks

    async def execute(self, step: Step) -> StepResult:
        """Sends a plan and waits for its result. Raises ``GpuWorkerDiedError``."""
        if self._lost:
            raise GpuWorkerDiedError("the gpu worker is gone")
        slot = self._producer.acquire()
        if slot is None:
            raise RuntimeError(
                "step ring is full although fewer plans than its slots are in flight"
            )
        write_step(step, slot)
        self._producer.publish()
        # One thread takes the results in the order of their plans.
        receiving = asyncio.get_running_loop().run_in_executor(self._thread, self._receive)
        self._receiving = receiving
        try:
            return await asyncio.shield(receiving)
        except GpuWorkerHungError:
            self.mark_dead()
            self.on_hang()
            raise

    def close(self) -> None:
        """Ends the receiving thread."""
        self.mark_dead()
        self._thread.shutdown(wait=True)

    def _receive(self) -> StepResult:
        """In the thread: the wait releases the GIL."""
        try:
            self._await_result()
        finally:
            self.waited_s = 0.0
        slot = self._consumer.front()
        if slot is None:
            raise RuntimeError("result ring woke its consumer but is empty")
        try:
            return read_result(slot)
        finally:
            del slot
            self._consumer.release()

    def _await_result(self) -> None:
        waited = 0  # slices: a clock would also count while this process itself is stopped
        while not self._consumer.wait(_WAIT_SLICE_S):
            if self._lost:
                raise GpuWorkerDiedError("the gpu worker died with a plan in flight")
            waited += 1
            self.waited_s = waited * _WAIT_SLICE_S
            if self.waited_s >= self._plan_timeout_s:
                self._lost = True  # so that plans behind this one do not wait as long again
                raise GpuWorkerHungError(
                    f"gpu worker {self.pid} did not answer a plan in {self._plan_timeout_s:g} s "
                    "(--plan-timeout)"
                )


def write_step(step: Step, slot: StepSlot) -> None:
    """Fills a slot of the step ring. A token that is still being sampled is left to the worker."""
    count = len(step.seqs)
    header = slot.header
    starts = np.cumsum(step.n_new) - step.n_new
    header["plan_id"] = step.plan_id
    header["n_rows"] = step.n_rows
    header["n_tokens"] = step.n_new.sum()
    header["n_swaps"] = len(step.swaps)
    header["flags"] = 0
    header["rank"] = 0
    table = slot.rows[:count]
    table["slot"] = step.slot
    table["kind"] = step.kind
    table["start"] = step.start
    table["n_new"] = step.n_new
    table["token_at"] = starts
    table["sample"] = step.sample
    table["stage"] = step.stage
    table["place"] = step.place
    swaps = slot.swaps[: len(step.swaps)]
    swaps["slot"] = [swap.slot for swap in step.swaps]
    swaps["kind"] = [swap.kind for swap in step.swaps]
    swaps["n_tokens"] = [swap.n_tokens for swap in step.swaps]
    rows = zip(step.seqs, step.start.tolist(), strict=True)
    slot.tokens[starts] = [
        seq.tokens[start] if start < len(seq.tokens) else UNKNOWN_TOKEN for seq, start in rows
    ]
    for i in np.flatnonzero(step.n_new > 1).tolist():
        start, n_new, at = int(step.start[i]), int(step.n_new[i]), int(starts[i])
        slot.tokens[at : at + n_new] = step.seqs[i].tokens[start : start + n_new]


def read_result(slot: ResultSlot) -> StepResult:
    """Copies a slot of the result ring."""
    header = slot.header
    rows = slot.rows[: int(header["n_rows"])]
    return StepResult(
        plan_id=int(header["plan_id"]),
        statuses=rows["status"].tolist(),
        tokens=rows["token"].tolist(),
        elapsed_s=float(header["elapsed"]),
        times=StageTimes(
            linear=_pair(header["linear"]),
            gpu_attn=_pair(header["gpu_attn"]),
            cpu_wait=_pair(header["cpu_wait"]),
            handoff=float(header["handoff"]),
            swap=float(header["swap"]),
            head=float(header["head"]),
            ride_wait=float(header["ride_wait"]),
        ),
        logprobs=_logprobs(slot) if header["n_logprobs"] else (),
    )


def _logprobs(slot: ResultSlot) -> list[RowLogprobs]:
    count = int(slot.header["n_logprobs"])
    entries, top = slot.logprobs[:count].tolist(), slot.top[:count].tolist()
    return [
        RowLogprobs(row, position, TokenLogprobs(token, own, rank, tuple(best[:n_top])))
        for (row, position, token, own, rank, n_top), best in zip(entries, top, strict=True)
    ]


def _pair(field: npt.NDArray[Any]) -> tuple[float, float]:
    return float(field[0]), float(field[1])
