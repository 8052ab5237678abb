"""The server's end of the rings to the gpu worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from neo_server.errors import GpuWorkerDiedError
from neo_server.scheduler import Step, StepResult

if TYPE_CHECKING:
    from neo_native import ResultConsumer, ResultSlot, StepProducer, StepSlot

_WAIT_SLICE_S = 0.1  # how soon a lost worker is noticed; costs nothing while no plan is in flight


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
    ) -> None:
        self.on_change = on_change  # called with is_ready
        self.num_gpu_blocks = 0
        self.device = ""
        self.pid = 0
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

    async def prepare(self, pid: int) -> None:
        """Empties the rings for a worker that registers; no other may live."""
        self.mark_dead()
        if self._receiving is not None:
            with contextlib.suppress(GpuWorkerDiedError, asyncio.CancelledError):
                await asyncio.shield(self._receiving)
        self._producer.reset()
        self._consumer.reset()
        self.pid = pid

    def report_ready(self, num_gpu_blocks: int, device: str) -> None:
        """The worker has loaded the model."""
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
            raise RuntimeError("step ring is full although no plan is in flight")
        write_step(step, slot)
        self._producer.publish()
        self._receiving = asyncio.get_running_loop().run_in_executor(self._thread, self._receive)
        return await asyncio.shield(self._receiving)

    def close(self) -> None:
        """Ends the receiving thread."""
        self.mark_dead()
        self._thread.shutdown(wait=True)

    def _receive(self) -> StepResult:
        """In the thread: the wait releases the GIL."""
        while not self._consumer.wait(_WAIT_SLICE_S):
            if self._lost:
                raise GpuWorkerDiedError("the gpu worker died with a plan in flight")
        slot = self._consumer.front()
        if slot is None:
            raise RuntimeError("result ring woke its consumer but is empty")
        try:
            return read_result(slot)
        finally:
            del slot
            self._consumer.release()


def write_step(step: Step, slot: StepSlot) -> None:
    """Fills a slot of the step ring."""
    rows = step.rows
    header = slot.header
    counts = np.fromiter((row.n_new for row in rows), np.uint32, len(rows))
    starts = (np.cumsum(counts) - counts).astype(np.uint32)
    header["plan_id"] = step.plan_id
    header["n_rows"] = [len(batch) for batch in step.batches] + [0] * (2 - len(step.batches))
    header["n_tokens"] = counts.sum()
    header["n_swaps"] = len(step.swaps)
    header["flags"] = 0
    header["rank"] = 0
    table = slot.rows[: len(rows)]
    table["slot"] = [row.slot for row in rows]
    table["kind"] = [row.kind for row in rows]
    table["start"] = [row.start for row in rows]
    table["n_new"] = counts
    table["token_at"] = starts
    table["sample"] = [row.sample for row in rows]
    swaps = slot.swaps[: len(step.swaps)]
    swaps["slot"] = [swap.slot for swap in step.swaps]
    swaps["kind"] = [swap.kind for swap in step.swaps]
    swaps["n_tokens"] = [swap.n_tokens for swap in step.swaps]
    slot.tokens[starts] = [row.seq.tokens[row.start] for row in rows]
    for row, at in zip(rows, starts.tolist(), strict=True):
        if row.n_new > 1:
            slot.tokens[at : at + row.n_new] = row.seq.tokens[row.start : row.start + row.n_new]


def read_result(slot: ResultSlot) -> StepResult:
    """Copies a slot of the result ring."""
    rows = slot.rows[: int(slot.header["n_rows"])]
    return StepResult(
        plan_id=int(slot.header["plan_id"]),
        statuses=rows["status"].tolist(),
        tokens=rows["token"].tolist(),
        elapsed_s=float(slot.header["elapsed"]),
    )
