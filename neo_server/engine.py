"""The server's heartbeat: admit, plan, send, receive, publish."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import count

from neo_native import RowStatus
from neo_server.block_manager import BlockManager
from neo_server.errors import (
    DuplicateRequestError,
    GpuWorkerDiedError,
    NeoError,
    OverloadedError,
    PlanCrashError,
    ShuttingDownError,
)
from neo_server.gpu_client import GpuLink
from neo_server.latencies import Latencies
from neo_server.metrics import Throughput
from neo_server.request import (
    Finish,
    FinishReason,
    OutputStream,
    Request,
    Sequence,
    StopConditions,
)
from neo_server.sampling import PLAIN, ResponseOptions, SamplingParams, sequence_id
from neo_server.scheduler import Scheduler
from neo_server.step import Step, StepResult
from neo_server.tokenizer import AnyTokenizer, StopStrings

_log = logging.getLogger(__name__)

_CRASHES = 3  # of gpu workers in a row, without a result: then the plan's requests are to blame


class Engine:
    """All requests that are being served. Lives on the event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        gpu: GpuLink,
        tokenizer: AnyTokenizer,
        make_blocks: Callable[[int], BlockManager],
        max_num_queued_reqs: int,
        on_void: Callable[[], None] = lambda: None,  # the cpu workers left a plan's rows undone
        clock: Callable[[], float] = time.monotonic,
        max_num_queued_tokens: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.throughput = Throughput()
        self.latencies = Latencies()
        self.accepting = True
        self._gpu = gpu
        self._make_blocks = make_blocks
        # Between its arrival and its first plan a request waits, so one always may.
        self._max_num_queued_reqs = max(max_num_queued_reqs, 1)
        self._max_num_queued_tokens = max_num_queued_tokens
        self._on_void = on_void
        self._clock = clock
        self._crashes = 0  # of gpu workers, since the last result
        self._requests: dict[str, dict[int, Request]] = {}  # by id, then index
        self._by_sequence: dict[int, Request] = {}
        self._ids = count()
        self._in_flight: deque[tuple[Step, asyncio.Future[StepResult]]] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Serves until cancelled. An error that no request explains ends all of them."""
        try:
            while True:
                await self._work.wait()
                if not (self.scheduler.has_work or self._in_flight):
                    self._work.clear()
                    continue
                await self._iterate()
        except Exception as error:
            self._fail_all(error)
            raise
        finally:
            for _, result in self._in_flight:
                result.cancel()

    async def _iterate(self) -> None:
        """Plans until enough is in flight, then takes the oldest result."""
        while self.scheduler.wants_plan:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._in_flight.append((step, asyncio.ensure_future(self._gpu.execute(step))))
            admitted = [self._by_sequence[seq.id] for seq in self.scheduler.admitted]
            self.latencies.note_planned(admitted, self._clock())
        step, future = self._in_flight.popleft()
        try:
            result = await future
        except GpuWorkerDiedError as error:
            await self._recover(error, step)
        else:
            self._crashes = 0
            if RowStatus.VOIDED in result.statuses:
                self._on_void()
            self.latencies.note_stages(result.times)
            self._publish(self.scheduler.update(step, result))

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        stop: StopConditions,
        stream: OutputStream | None = None,  # None: a new one
    ) -> OutputStream:
        """Queues a checked request of one completion; its output comes through the stream."""
        (request,) = self.submit_all(request_id, prompt, [sampling], stop, streams=[stream])
        return request.stream

    def submit_all(
        self,
        request_id: str,
        prompt: list[int],
        samplings: SequenceOf[SamplingParams],  # one for each completion of the prompt
        stop: StopConditions,
        options: ResponseOptions = PLAIN,
        priority: int = 0,
        streams: SequenceOf[OutputStream | None] = (),
    ) -> list[Request]:
        """Queues a checked request: all of its completions, or none. Raises ``NeoError``."""
        if not self.accepting:
            raise ShuttingDownError("the server is shutting down")
        if request_id in self._requests:
            raise DuplicateRequestError(f"request_id {request_id!r} is in use")
        self._check_queue(len(prompt), len(samplings))
        made = [
            self._make(request_id, index, prompt, sampling, stop, options, priority)
            for index, sampling in enumerate(samplings)
        ]
        for request, stream in zip(made, streams, strict=False):
            request.stream = stream or request.stream
        self._requests[request_id] = {request.index: request for request in made}
        for request in made:
            self._by_sequence[request.sequence.id] = request
            self.scheduler.add(request.sequence)
        self._idle.clear()
        self._work.set()
        return made

    def _make(
        self,
        request_id: str,
        index: int,
        prompt: list[int],
        sampling: SamplingParams,
        stop: StopConditions,
        options: ResponseOptions,
        priority: int,
    ) -> Request:
        if stop.min_tokens and stop.stop_token_ids:
            held_back = tuple(sorted(stop.stop_token_ids))
            sampling = replace(sampling, min_tokens=stop.min_tokens, held_back=held_back)
        number = sequence_id(next(self._ids), priority)
        sequence = Sequence(number, array("i", prompt), len(prompt), sampling)
        sequence.max_len = len(prompt) + stop.max_tokens
        stops = StopStrings(stop.stop, include_in_output=stop.include_stop_str_in_output)
        skip = options.skip_special_tokens
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=skip)
        return Request(
            *(request_id, sequence, stop, detokenizer, stops, OutputStream(), self._clock()),
            index=index,
            options=options,
            tokenizer=self.tokenizer,
        )

    def _check_queue(self, num_prompt: int, n: int) -> None:
        """Refuses a request that would wait beyond a limit; an empty queue takes any."""
        waiting, tokens = len(self.scheduler.waiting), self.scheduler.num_waiting_tokens
        if waiting and waiting + n > self._max_num_queued_reqs:
            raise OverloadedError(
                f"{waiting} requests wait{_more(n)}; "
                f"max_num_queued_reqs is {self._max_num_queued_reqs}"
            )
        limit = self._max_num_queued_tokens
        if limit is not None and waiting and tokens + n * num_prompt > limit:
            raise OverloadedError(
                f"{tokens} tokens wait, the prompt has {num_prompt}{_more(n)}; "
                f"max_num_queued_tokens is {limit}"
            )

    def request(self, request_id: str, index: int = 0) -> Request | None:
        """A request that is being served."""
        return self._requests.get(request_id, {}).get(index)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request wherever it is, or one completion of it; unknown ones are no error."""
        for request in list(self._requests.get(request_id, {}).values()):
            if index is None or request.index == index:
                request.end(Finish(FinishReason.ABORT))
                self._forget(request)

    async def drain(self, timeout_s: float) -> None:
        """Takes no new work; running streams may finish for ``timeout_s``, then are aborted."""
        self.accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            _log.warning("%d requests aborted at shutdown", len(self._by_sequence))
            for request_id in list(self._requests):
                self.abort(request_id)

    def reset_metrics(self) -> None:
        """Forgets what was counted, and the lengths of requests: a warm-up's are nobody's."""
        self.scheduler.forget()
        self.throughput = Throughput()
        self.latencies = Latencies()

    def _publish(self, sampled: list[tuple[Sequence, int]]) -> None:
        self.throughput.add(len(sampled))
        requests = [self._by_sequence[sequence.id] for sequence, _ in sampled]
        self.latencies.note_tokens(requests, self._clock())
        for request, (_, token) in zip(requests, sampled, strict=True):
            request.accept(token)
            if request.finish is not None:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        completions = self._requests[request.request_id]
        del completions[request.index]
        if not completions:
            del self._requests[request.request_id]
        del self._by_sequence[request.sequence.id]
        self.scheduler.finish(request.sequence)
        self.latencies.note_end(request, self._clock())
        if not self._requests:
            self._idle.set()

    async def _recover(self, error: NeoError, step: Step) -> None:
        """Both caches are lost with the gpu worker; prompts and outputs so far are not.

        Raises ``PlanCrashError`` when workers still die after the requests of the plan on which
        they died were given up.
        """
        self._crashes += 1
        if self._crashes >= 2 * _CRASHES:
            raise PlanCrashError(f"{error}, {self._crashes} times in a row")
        _log.warning("%s; %d requests will be prefilled again", error, len(self._by_sequence))
        later = [future for _, future in self._in_flight]
        self._in_flight.clear()
        await asyncio.gather(*later, return_exceptions=True)  # lost with the worker, like this one
        if self._crashes == _CRASHES:
            self._give_up(step, PlanCrashError(f"{error}, {_CRASHES} times in a row"))
        num_gpu_blocks = await self._gpu.recovered()
        self.scheduler.reset(self._make_blocks(num_gpu_blocks))
        self.scheduler.metrics.num_gpu_worker_restarts += 1

    def _give_up(self, step: Step, error: NeoError) -> None:
        """Fails the requests of a plan."""
        for seq in step.seqs:
            request = self._by_sequence.get(seq.id)
            if request is not None:
                request.stream.fail(error)
                self._forget(request)

    def _fail_all(self, error: Exception) -> None:
        self.accepting = False
        failure = error if isinstance(error, NeoError) else NeoError(f"engine failed: {error!r}")
        for request in list(self._by_sequence.values()):
            request.stream.fail(failure)
            self._forget(request)


def _more(n: int) -> str:
    return "" if n == 1 else f" and n is {n}"
