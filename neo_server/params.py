"""What a user asks for, as every client of the engine says it: parameters and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeGuard, cast

from neo_server.errors import InvalidRequestError
from protos import inference_pb2 as pb

Message = Mapping[str, str]  # role and content
Prompt = str | Sequence[int] | Sequence[Message]  # a text, token ids, or a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request is over.

    Every field is the field of that name in protos/inference.proto, which says what it means;
    ``None`` leaves the server's default. Values are checked where the request is served.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None

    def message(self) -> pb.GenerateRequest:
        """A request without a prompt.

        Raises ``InvalidRequestError`` for what a field cannot hold.
        """
        request = pb.GenerateRequest()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _set(request, field.name, value)
        return request


def request_of(
    prompt: Prompt, params: SamplingParams | None = None, request_id: str = ""
) -> pb.GenerateRequest:
    """A whole request. Raises ``InvalidRequestError``."""
    request = (params or SamplingParams()).message()
    request.request_id = request_id
    try:
        if isinstance(prompt, str):
            request.text = prompt
        elif is_conversation(prompt):
            for message in prompt:
                request.conversation.messages.add(**message)
        else:
            request.token_ids.ids.extend(cast(Sequence[int], prompt))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"prompt: {error}", "prompt") from error
    return request


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Messages, each with ``role`` and ``content``."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_prompt(prompts: object) -> bool:
    """One prompt, rather than several."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


@cache
def _homes() -> dict[str, str]:
    """Which field of ``GenerateRequest`` holds the message that has a field; empty: itself."""
    own = pb.GenerateRequest.DESCRIPTOR.fields
    homes = {field.name: "" for field in own}
    for field in own:
        if field.message_type is not None and field.containing_oneof is None:
            homes |= {inner.name: field.name for inner in field.message_type.fields}
    return homes


def _set(request: pb.GenerateRequest, name: str, value: Any) -> None:
    home = _homes()[name]
    message = getattr(request, home) if home else request
    try:
        current = getattr(message, name)
        if isinstance(value, str) and not isinstance(current, str):
            value = [value]  # one of a repeated field
        if isinstance(value, Mapping):
            current.update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            current.extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"{name} is {value!r:.100}: {error}", name) from error
