"""Bodies of requests. A field that the server does not have is refused by name, never dropped."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from neo_server.errors import InvalidRequestError
from protos import inference_pb2 as pb

_UINT32 = Field(ge=0, le=2**32 - 1)
_INT32 = Field(ge=-(2**31), lt=2**31)
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_COMPLETION_TOKENS = 16  # OpenAI's default for completions

# What the engine lacks, with the values that ask for nothing.
_LACKING: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "reasoning_effort": (),
}
_WITHOUT_EFFECT = frozenset(  # on what is generated
    (
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls"),
        *("safety_identifier", "prompt_cache_key"),
    )
)


def _same(value: object, other: object) -> bool:
    """0 is not ``False``: ``logprobs: 0`` asks for those of the chosen tokens."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def utf8(text: str) -> str:
    """The text, unless it has no UTF-8: JSON can spell lone surrogates. Raises ``ValueError``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it has a lone surrogate at character {error.start}; it must be Unicode"
        ) from None
    return text


Text = Annotated[str, AfterValidator(utf8)]


class Body(BaseModel):
    """``null`` is the same as absent."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_there_is(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if value is None or name in _WITHOUT_EFFECT:
                continue
            if name not in _LACKING or name in cls.model_fields:
                kept[name] = value
            elif not any(_same(value, nothing) for nothing in _LACKING[name]):
                raise InvalidRequestError(
                    f"{name} is {value!r:.100}; this server does not support it", name
                )
        return kept


class StreamOptions(Body):
    """Of ``stream: true``."""

    include_usage: bool = False


class Generation(Body):
    """What both kinds of completion have. The names of vLLM's additions are vLLM's."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, _UINT32] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | list[Text] = []
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    min_tokens: Annotated[int, _UINT32] = 0
    stop_token_ids: list[Annotated[int, _UINT32]] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: Annotated[int, _UINT32] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Annotated[int, _UINT32], float] = {}
    prompt_logprobs: Annotated[int, _UINT32] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, _INT32] | None = None
    priority: Annotated[int, _INT32] = 0

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is set; it must be unset unless stream is true", "stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                f"prompt_logprobs is {self.prompt_logprobs}; it must be unset if stream is true",
                "prompt_logprobs",
            )
        return self

    @property
    def include_usage(self) -> bool:
        """A last chunk with the usage is wanted."""
        return self.stream_options is not None and self.stream_options.include_usage

    def message(self) -> pb.GenerateRequest:
        """As gRPC would carry it, without a prompt."""
        message = pb.GenerateRequest()
        sampling, conditions = message.sampling_params, message.stop_conditions
        for name in _SAMPLING:
            value = getattr(self, name)
            if value is not None:
                setattr(sampling, name, value)
        for token, bias in self.logit_bias.items():
            sampling.logit_bias[token] = bias
        if self.prompt_logprobs is not None:
            message.response_options.prompt_logprobs = self.prompt_logprobs
        message.response_options.skip_special_tokens = self.skip_special_tokens
        if self.truncate_prompt_tokens is not None:
            message.truncate_prompt_tokens = self.truncate_prompt_tokens
        message.priority = self.priority
        if self.seed is not None:
            sampling.seed = self.seed % 2**64
        if self.max_tokens is not None:
            conditions.max_tokens = self.max_tokens
        conditions.min_tokens = self.min_tokens
        conditions.stop.extend([self.stop] if isinstance(self.stop, str) else self.stop)
        conditions.stop_token_ids.extend(self.stop_token_ids)
        conditions.include_stop_str_in_output = self.include_stop_str_in_output
        conditions.ignore_eos = self.ignore_eos
        return message


def _prompts(value: object) -> list[str] | list[list[int]]:
    """OpenAI allows a text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return [utf8(value)]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return [utf8(one) for one in value]
        if _are_tokens(value):
            return [value]
        if all(isinstance(one, list) and _are_tokens(one) for one in value):
            return value
    raise ValueError("it must be a text, texts, token ids, or lists of token ids")


def _are_tokens(value: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 2**32 for one in value)


class CompletionBody(Generation):
    """``POST /v1/completions``; several prompts give several choices."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    max_tokens: Annotated[int, _UINT32] | None = _COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)] | None = None
    echo: bool = False

    def message(self) -> pb.GenerateRequest:
        """See ``Generation``; what an echoed prompt is told with is what the output is."""
        message = super().message()
        message.response_options.echo = self.echo
        if self.logprobs is not None:
            message.response_options.logprobs = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                message.response_options.prompt_logprobs = self.logprobs
        return message

    def messages(self) -> list[pb.GenerateRequest]:
        """One for each prompt."""
        messages = []
        for prompt in self.prompt:
            message = self.message()
            if isinstance(prompt, str):
                message.text = prompt
            else:
                message.token_ids.ids.extend(prompt)
            messages.append(message)
        return messages


class Message(BaseModel):
    """One of a conversation; other fields than these are the template's to read."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        """Parts are joined by newlines; there are none but texts."""
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        texts = []
        for part in value:
            if not (isinstance(part, dict) and part.get("type") == "text" and "text" in part):
                raise ValueError("its parts must be of type text")
            texts.append(str(part["text"]))
        return "\n".join(texts)


class Conversation(Body):
    """What the chat template is given."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool = True


class ChatBody(Conversation, Generation):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: Annotated[int, _UINT32] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, _UINT32] | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs}; it must be unset unless logprobs is true",
                "top_logprobs",
            )
        return self

    def message(self) -> pb.GenerateRequest:
        """See ``Generation``; ``max_completion_tokens`` is the newer name of ``max_tokens``."""
        message = super().message()
        if self.max_completion_tokens is not None:
            message.stop_conditions.max_tokens = self.max_completion_tokens
        if self.logprobs:
            message.response_options.logprobs = self.top_logprobs or 0
        return message


class TokenizeText(Body):
    """``POST /tokenize`` of a text."""

    prompt: Text
    add_special_tokens: bool = True


class TokenizeChat(Conversation):
    """``POST /tokenize`` of a conversation."""


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: list[int]
