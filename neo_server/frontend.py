"""What every protocol does with a request: encode the prompt, check it, submit it, let it go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from neo_server.admission import (
    check_length,
    check_priority,
    check_prompt,
    check_request_id,
    check_stop_strings,
    check_text,
    completions_of,
    kept_tokens,
    sampling_of,
    stop_of,
    told_of,
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
        """As ``submit_all``, for protocols whose answers have one completion."""
        if message.sampling_params.n > 1:
            raise InvalidRequestError(f"n is {message.sampling_params.n}; it must be 1 here", "n")
        (served,) = await self.submit_all(message)
        return served

    async def submit_all(self, message: pb.GenerateRequest) -> list[Request]:
        """The request's completions; ``release`` has to follow for each, however it ends.

        Raises ``NeoError``: then there are none.
        """
        engine, resolved = self._state.serving_engine(), self._state.resolved
        request_id = check_request_id(message.request_id)
        priority = check_priority(message.priority)
        limit, limit_name = _limit(self._state, engine)
        ids = await self._prompt(message, limit, limit_name)
        check_prompt(ids, resolved.model.vocab_size, limit, limit_name)
        sampling, options = told_of(
            message.response_options,
            sampling_of(message.sampling_params, resolved.model.vocab_size),
            resolved.config.scheduler.max_logprobs,
            resolved.has_tokenizer,
        )
        samplings = completions_of(message.sampling_params, sampling)
        stop = stop_of(message.stop_conditions, limit - len(ids), resolved.model)
        check_stop_strings(stop.stop, resolved.has_tokenizer)
        return engine.submit_all(request_id, ids, samplings, stop, options, priority)

    def release(self, served: Request) -> None:
        """Nobody reads it any more: unless it is over, it ends and its cache is freed."""
        engine = self._state.serving_engine()
        if engine.request(served.request_id, served.index) is served:
            engine.abort(served.request_id, served.index)

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
        """Cut to its end where that is asked for; what begins every text stays before it."""
        kind = message.WhichOneof("prompt")
        kept = kept_tokens(message, limit, limit_name)
        if kind == "token_ids":
            ids = message.token_ids.ids if kept is None else message.token_ids.ids[-kept:]
            check_length(len(ids), limit, limit_name)
            return list(ids)
        if kind is None:
            raise InvalidRequestError(
                "prompt is unset; it must be text, token_ids or conversation", "prompt"
            )
        if kind == "conversation":
            messages = message.conversation.messages
            ids = await self.encode_messages(
                [{"role": one.role, "content": one.content} for one in messages]
            )
        else:
            if kept is None:
                check_text(message.text, limit, limit_name, self._state.tokenizer.longest_token)
            ids = await self.encode(message.text)
        if kept is None or len(ids) <= kept:
            return ids
        prefix = list(self._state.tokenizer.prefix)[:kept]
        return prefix + ids[len(ids) - (kept - len(prefix)) :]


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
