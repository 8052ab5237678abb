"""Gives the engine all requests at once and notes when their tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from neo_server.bench.workload import Prompt
from neo_server.engine import Engine
from neo_server.errors import ConfigurationError, NeoError
from neo_server.request import Finish, OutputStream, Request, SamplingParams, StopConditions

_POLL_S = 0.001
_EMPTIED_WAIT_S = 120.0  # for plans whose requests have all ended


class Recorder(OutputStream):
    """An output stream that nobody reads; ``on_end`` is called once, at its end."""

    def __init__(
        self, on_end: Callable[[], None], device_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """``device_s``: seconds that the gpu worker has spent on plans so far."""
        super().__init__()
        self.error: NeoError | None = None
        self.times: list[float] = []  # of every token, by time.perf_counter()
        self.device_times: list[float] = []  # of every token, by ``device_s``
        self.request: Request | None = None  # once it is submitted
        self.num_gpu_decodes = 0  # steps of the request, when it ends
        self.num_cpu_decodes = 0
        self._on_end = on_end
        self._device_s = device_s

    def push(self, text: str, token_ids: Sequence[int], finish: Finish | None = None) -> None:
        """See ``OutputStream``."""
        self.times.extend([time.perf_counter()] * len(token_ids))
        self.device_times.extend([self._device_s()] * len(token_ids))
        if finish is not None:
            if self.request is not None:
                self.num_gpu_decodes = self.request.sequence.num_gpu_decodes
                self.num_cpu_decodes = self.request.sequence.num_cpu_decodes
            self._on_end()

    def fail(self, error: NeoError) -> None:
        """See ``OutputStream``."""
        super().fail(error)
        self.error = error
        self._on_end()


async def drive(
    engine: Engine,
    prompts: Sequence[Prompt],
    temperature: float,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[float, list[Recorder]]:
    """When the requests were submitted (``time.perf_counter()``), and their records.

    ``on_end`` is called whenever a request ends. Raises the first error of a request, and
    ``ConfigurationError`` for one that the caches can never hold.
    """
    check_longest(engine, max(len(prompt.ids) + prompt.num_output for prompt in prompts))
    left = len(prompts)
    over = asyncio.Event()

    def one_ended() -> None:
        nonlocal left
        left -= 1
        on_end()
        if not left:
            over.set()

    begin = time.perf_counter()
    metrics = engine.scheduler.metrics
    records = [Recorder(one_ended, lambda: metrics.device_s) for _ in prompts]
    for i, (prompt, record) in enumerate(zip(prompts, records, strict=True)):
        sampling = SamplingParams(seed=i, temperature=temperature)
        stop = StopConditions(max_tokens=prompt.num_output)
        id_ = f"bench-{i}"
        (record.request,) = engine.submit_all(id_, prompt.ids, [sampling], stop, streams=[record])
    await over.wait()
    for prompt, record in zip(prompts, records, strict=True):
        if record.error is not None:
            raise record.error
        if len(record.times) != prompt.num_output:
            raise NeoError(f"{len(record.times)} tokens came where {prompt.num_output} were asked")
    return begin, records


async def emptied(engine: Engine) -> None:
    """Returns when no plan is in flight and both caches are empty; no request may be left.

    Raises ``NeoError`` where something of a cache is still held, or a plan does not come back.
    """
    scheduler = engine.scheduler
    deadline = time.monotonic() + _EMPTIED_WAIT_S
    while scheduler.in_flight or scheduler.has_work:
        if time.monotonic() > deadline:
            raise NeoError(
                f"{scheduler.in_flight} plans are in flight {_EMPTIED_WAIT_S:g} s after the last "
                "request ended"
            )
        await asyncio.sleep(_POLL_S)
    blocks = scheduler.blocks
    held = blocks.blocks.used, blocks.pages.used, blocks.slots.used
    if any(held):
        raise NeoError(f"{held} blocks, pages and slots are held, and no request is there")


def check_longest(engine: Engine, tokens: int) -> None:
    """Raises ``ConfigurationError`` where the caches never hold so many of one request."""
    limit = engine.scheduler.max_tokens_per_sequence
    if tokens > limit:
        raise ConfigurationError(
            f"a request has {tokens} tokens; max_model_len and the caches allow {limit}"
        )
