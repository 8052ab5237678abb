"""``AsyncLLM``: the engine and its worker processes behind an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from neo_native import NativeError
from neo_server.choices import Choices
from neo_server.engine import Engine
from neo_server.engine_options import engine_options
from neo_server.errors import ConfigurationError, NeoError, NotReadyError, ShuttingDownError
from neo_server.frontend import Frontend
from neo_server.info import loads, model_info, server_info
from neo_server.launch import resolve
from neo_server.outputs import Delta, RequestOutput, deltas_of, whole_of
from neo_server.params import Prompt, SamplingParams, request_of
from neo_server.server import Server
from neo_server.service import responses
from neo_server.state import ServerState
from protos import inference_pb2 as pb


class AsyncLLM:
    """One model, served to this process alone by the gpu worker and cpu-attention workers.

    ::

        async with AsyncLLM("path/to/model") as llm:
            async for delta in llm.stream("The capital of France is"):
                print(delta.text, end="")

    Signals are the program's own: it closes this, or ends, and the workers end with it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """``options``: the flags of ``neo serve`` that concern the engine, with underscores.

        Raises ``ConfigurationError``, before anything is started, for what is impossible.
        """
        self._server = Server(*_checked(model, options))
        self._life: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self._state: ServerState | None = None  # while the engine runs
        self._served: set[Choices] = set()
        self._ended = "the engine has not been started"

    async def start(self) -> None:
        """Starts the workers; returns when the engine is warm. Raises ``NeoError``."""
        if self._life is not None:
            return
        self._opened = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(lambda life: life.cancelled() or life.exception())
        try:
            await asyncio.wait((self._life, self._opened), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._life.done():
            await self._life

    async def close(self) -> None:
        """Ends what runs, every worker process and shared segment. May be called twice."""
        self._closing.set()
        if self._life is None:
            return
        if self._opened is not None and not self._opened.done():
            self._life.cancel()  # it is still starting
        await asyncio.wait((self._life,))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> RequestOutput:
        """The whole answer to a text, token ids, or a conversation. Raises ``NeoError``."""
        return await whole_of(self._messages(prompt, params, request_id, whole=True))

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> AsyncGenerator[Delta]:
        """The answer as it comes. Closing the iterator ends the request. Raises ``NeoError``."""
        async with aclosing(
            deltas_of(self._messages(prompt, params, request_id, whole=False))
        ) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; an unknown id is no error."""
        self._running().serving_engine().abort(request_id)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, as the prompt of a request has them."""
        frontend = Frontend(self._running())
        return await frontend.encode(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the whole."""
        frontend = Frontend(self._running())
        return await frontend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    async def loads(self) -> pb.GetLoadsResponse:
        """Queue lengths, cache occupation, counters."""
        return loads(self._running())

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Configuration and workers."""
        return server_info(self._running())

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What a client has to know of the model."""
        return model_info(self._running())

    def _running(self) -> ServerState:
        if self._state is None:
            kind = NotReadyError if self._life is None else ShuttingDownError
            raise kind(self._ended)
        return self._state

    async def _messages(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, *, whole: bool
    ) -> AsyncGenerator[pb.GenerateResponse]:
        frontend = Frontend(self._running())
        served = await Choices.submit(frontend, [request_of(prompt, params, request_id)])
        self._served.add(served)
        try:
            if whole:
                await served.over()
            async with aclosing(responses(served)) as messages:
                async for message in messages:
                    yield message
        finally:
            if served in self._served:
                self._served.remove(served)
                served.release()

    async def _live(self) -> None:
        """From the first worker's start to the last one's end."""
        try:
            await self._server.offline(self._hold, signals=False)
        except NeoError as error:
            self._ended = f"the engine has ended: {error}"
            raise
        except (NativeError, OSError, RuntimeError) as error:
            self._ended = f"the engine has ended: {error}"
            raise NeoError(str(error)) from error
        else:
            self._ended = "the engine is closed"

    async def _hold(self, state: ServerState, engine: Engine) -> None:
        """Until ``close``, or until the engine fails; then nothing touches it any more."""
        assert self._opened is not None
        self._state = state
        self._opened.set_result(None)
        try:
            await self._closing.wait()
        finally:
            self._state = None
            self._end_requests()

    def _end_requests(self) -> None:
        """Before the caches are unmapped; their readers learn of it."""
        served, self._served = self._served, set()
        what = "is closed" if self._closing.is_set() else "has ended"
        for choices in served:
            choices.release()
            choices.fail(ShuttingDownError(f"the engine {what}"))


def _checked(model: str, options: dict[str, Any]) -> tuple[Any, Any]:
    chosen = engine_options(model, options)
    try:
        return chosen, resolve(chosen)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
