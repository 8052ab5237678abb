"""What every protocol does with a request: encode the prompt, check it, submit it, let it go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from neo_server.admission import (
    check_length,
    check_prompt,
    check_request_id,
    check_stop_strings,
    check_text,
    sampling_of,
    stop_of,
)
from neo_server.engine import Engine
from neo_server.errors import InvalidRequestError
from neo_server.plan import Place
from neo_server.request import Request
from neo_server.state import ServerState
from protos import inference_pb2 as pb

T = TypeVar("T")
_LONG = 4096  # characters or tokens; from there on the tokenizer works beside the event loop


class Frontend:
    """Between the public services and the engine."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def submit(self, message: pb.GenerateRequest) -> Request:
        """A request that is being served; ``release`` has to follow, however its reader ends.

        Raises ``NeoError``.
        """
        engine = self._state.serving_engine()
        request_id = check_request_id(message.request_id)
        model = self._state.resolved.model
        limit, limit_name = _limit(self._state, engine)
        ids = await self._prompt(message, limit, limit_name)
        check_prompt(ids, model.vocab_size, limit, limit_name)
        sampling = sampling_of(message.sampling_params)
        stop = stop_of(message.stop_conditions, limit - len(ids), model)
        check_stop_strings(stop.stop, self._state.resolved.has_tokenizer)
        engine.submit(request_id, ids, sampling, stop)
        served = engine.request(request_id)
        assert served is not None
        return served

    def release(self, served: Request) -> None:
        """Nobody reads it any more: unless it is over, it ends and its cache is freed."""
        engine = self._state.serving_engine()
        if engine.request(served.request_id) is served:
            engine.abort(served.request_id)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text of any length."""
        tokenizer = self._state.tokenizer
        return await _call(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises ``InvalidRequestError`` where there is no template, or it refuses the messages.
        """
        template = self._state.chat_template
        if not messages:
            raise InvalidRequestError("messages is empty; it must have at least one", "messages")
        if template is None:
            raise InvalidRequestError(
                "messages is set; the model has no chat template: send a prompt", "messages"
            )
        try:
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            text.encode()  # JSON can spell lone surrogates
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "messages has a lone surrogate; it must be Unicode", "messages"
            ) from error
        except ValueError as error:
            raise InvalidRequestError(f"messages: {error}", "messages") from error
        return await self.encode_chat(text)

    async def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, with exactly one BOS.

        Raises ``InvalidRequestError`` for a text that no prompt can be as long as.
        """
        engine, tokenizer = self._state.serving_engine(), self._state.tokenizer
        check_text(text, *_limit(self._state, engine), tokenizer.longest_token)
        return await _call(len(text), lambda: tokenizer.encode_chat(text))

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises ``InvalidRequestError`` for unknown ones."""
        vocab_size = self._state.resolved.model.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(id_ for id_ in ids if not 0 <= id_ < vocab_size)
            raise InvalidRequestError(
                f"token id is {wrong}; it must be below vocab_size, {vocab_size}", "tokens"
            )
        tokenizer = self._state.tokenizer
        return await _call(
            len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    async def _prompt(self, message: pb.GenerateRequest, limit: int, limit_name: str) -> list[int]:
        kind = message.WhichOneof("prompt")
        if kind == "token_ids":
            check_length(len(message.token_ids.ids), limit, limit_name)
            return list(message.token_ids.ids)
        if kind == "conversation":
            messages = message.conversation.messages
            return await self.encode_messages(
                [{"role": one.role, "content": one.content} for one in messages]
            )
        if kind is None:
            raise InvalidRequestError(
                "prompt is unset; it must be text, token_ids or conversation", "prompt"
            )
        check_text(message.text, limit, limit_name, self._state.tokenizer.longest_token)
        return await self.encode(message.text)


async def _call(length: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if length >= _LONG else work()


def _limit(state: ServerState, engine: Engine) -> tuple[int, str]:
    """Tokens that prompt and output may have together, and what limits them."""
    limit = engine.scheduler.max_tokens_per_sequence
    if limit == state.resolved.config.scheduler.max_model_len:
        return limit, "max_model_len"
    blocks = engine.scheduler.blocks
    places = engine.scheduler.policy.places
    sizes = [
        f"{blocks.blocks.total} GPU blocks of {blocks.block_size}" * (Place.GPU in places),
        f"{blocks.pages.total} CPU pages of {blocks.page_size}" * (Place.CPU in places),
    ]
    return limit, f"the cache ({' or '.join(filter(None, sizes))} tokens)"
