"""``LLM``: offline batches, without asyncio in the user's program."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import uvloop
from rich.console import Console

from neo_server.async_llm import AsyncLLM
from neo_server.errors import InvalidRequestError, NeoError
from neo_server.outputs import RequestOutput
from neo_server.params import Message, Prompt, SamplingParams, is_conversation, is_prompt
from neo_server.progress import progress
from protos import inference_pb2 as pb

T = TypeVar("T")


class LLM:
    """One model, with its worker processes, for batches of prompts.

    ::

        with LLM("path/to/model") as llm:
            for output in llm.generate(["The capital of France is", "2 + 2 ="]):
                print(output.text)

    The engine runs on a thread of its own, so that this also works where an event loop runs
    already. Without ``close`` or ``with`` the workers end when the object does, or the program.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Returns when the engine is warm; ``options`` as ``AsyncLLM``'s. Raises ``NeoError``."""
        llm = AsyncLLM(model, **options)
        self._llm = llm
        self._thread = _LoopThread()
        self._close = weakref.finalize(self, _close, llm, self._thread)
        try:
            self._thread.call(llm.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the worker processes and removes the shared segments. May be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts.

        ``prompts``: one or several texts, lists of token ids, or conversations. ``params``: for
        all, or one for each. ``show_progress``: a bar on stderr, where that is a terminal. Raises
        ``NeoError``; a request that is refused, which the message names, ends the others.
        """
        several = [cast(Prompt, prompts)] if is_prompt(prompts) else list(prompts)
        each = [params] * len(several) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(several):
            raise InvalidRequestError(
                f"params has {len(each)} entries; there are {len(several)} prompts", "params"
            )
        pairs = list(zip(cast(list[Prompt], several), each, strict=True))
        with progress(Console(stderr=True, quiet=not show_progress), "requests", len(pairs)) as bar:
            return self._thread.call(_generate_all(self._llm, pairs, bar))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one or several conversations in the model's chat template.

        ``messages``: mappings with ``role`` and ``content``.
        """
        several = [messages] if is_conversation(messages) else messages
        for index, one in enumerate(several):
            if not is_conversation(one):
                raise InvalidRequestError(f"conversation {index} has no messages", "messages")
        return self.generate(cast(Sequence[Prompt], several), params, show_progress=show_progress)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, as the prompt of a request has them."""
        return self._thread.call(self._llm.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the whole."""
        return self._thread.call(self._llm.detokenize(ids, skip_special_tokens=skip_special_tokens))

    def loads(self) -> pb.GetLoadsResponse:
        """Queue lengths, cache occupation, counters."""
        return self._thread.call(self._llm.loads())

    def server_info(self) -> pb.GetServerInfoResponse:
        """Configuration and workers."""
        return self._thread.call(self._llm.server_info())

    def model_info(self) -> pb.GetModelInfoResponse:
        """What a client has to know of the model."""
        return self._thread.call(self._llm.model_info())


class _LoopThread:
    """An event loop on a daemon thread: the program may end without closing it."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="neo", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt of the caller cancels it."""
        if self._loop.is_closed():
            work.close()
            raise NeoError("the engine is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the loop."""
        if self._loop.is_closed():
            return
        self.call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(llm: AsyncLLM, thread: _LoopThread) -> None:
    """Has no reference to the ``LLM``, which would never be collected otherwise."""
    thread.call(llm.close())
    thread.close()


async def _generate_all(
    llm: AsyncLLM,
    pairs: Sequence[tuple[Prompt, SamplingParams | None]],
    advance: Callable[[], None],
) -> list[RequestOutput]:
    async def one(index: int) -> RequestOutput:
        try:
            output = await llm.generate(*pairs[index])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {index}: {error}", error.param) from error
        advance()
        return output

    tasks = [asyncio.create_task(one(index)) for index in range(len(pairs))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
