"""Checks of what a client sent: every refusal names the field, the value and the limit."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

from neo_server.errors import InvalidRequestError
from neo_server.request import StopConditions
from neo_server.sampling import MAX_PRIORITY, ResponseOptions, SamplingParams
from protos import inference_pb2 as pb
from protos.model_config import ModelConfig

_MAX_ID = 256
_MAX_STOPS = 64
_MAX_STOP_LENGTH = 1024  # characters
_MAX_STOP_TOKENS = 1024
_MAX_BIASES = 300  # as OpenAI's
_MAX_N = 128
_GREEDY = 1e-5  # temperatures below it draw nothing, as in vLLM


def _require(field: str, value: object, fits: bool, limit: str, param: str = "") -> None:
    """``param``: the field's name where ``field`` is what of it does not fit."""
    if not fits:
        raise InvalidRequestError(f"{field} is {value}; it must be {limit}", param or field)


def _require_at_most(field: str, value: int, most: int, param: str) -> None:
    _require(field, value, value <= most, f"<= {most}", param)


def _require_at_most_in(field: str, value: int, most: int, limit_name: str) -> None:
    _require(field, value, value <= most, f"<= {most}, to fit in {limit_name}")


def check_request_id(request_id: str) -> str:
    """The client's id, or a new one."""
    _require_at_most("length of request_id", len(request_id), _MAX_ID, "request_id")
    return request_id or f"req-{secrets.token_hex(8)}"


def check_length(count: int, limit: int, limit_name: str) -> None:
    """Refuses a prompt of so many tokens that no output token has room."""
    if count + 1 > limit:
        raise InvalidRequestError(
            f"prompt has {count} tokens; with one output token it must fit in {limit_name}, "
            f"{limit} tokens",
            "prompt",
        )


def check_text(text: str, limit: int, limit_name: str, longest_token: int) -> None:
    """Refuses a text that is too long whatever its tokens are, before it is tokenised."""
    most = limit * longest_token
    if len(text) > most:
        raise InvalidRequestError(
            f"text has {len(text)} characters; {limit_name}, {limit} tokens, holds at most {most}",
            "prompt",
        )


def check_prompt(ids: list[int], vocab_size: int, limit: int, limit_name: str) -> None:
    """Refuses an empty prompt, unknown tokens, and what leaves no room for an output token."""
    if not ids:
        raise InvalidRequestError("prompt has 0 tokens; it must have at least 1", "prompt")
    check_length(len(ids), limit, limit_name)
    below = f"below vocab_size, {vocab_size}"
    _require("prompt token id", max(ids), max(ids) < vocab_size, below, "prompt")


def check_stop_strings(stop: tuple[str, ...], has_tokenizer: bool) -> None:
    """Refuses stop strings where outputs have no text."""
    fits = has_tokenizer or not stop
    _require("number of stop strings", len(stop), fits, "0 without a tokenizer", "stop")


def sampling_of(message: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    """Sampling parameters with the defaults filled in."""
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    fits = math.isfinite(temperature) and temperature >= 0.0
    _require("temperature", _short(temperature), fits, "finite and >= 0")
    _require("top_p", _short(top_p), 0.0 < top_p <= 1.0, "in (0, 1]")
    _require("min_p", _short(message.min_p), 0.0 <= message.min_p <= 1.0, "in [0, 1]")
    _require("top_k", message.top_k, message.top_k >= -1, ">= 0 (0 or -1: all)")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(message, name)
        _require(name, _short(value), -2.0 <= value <= 2.0, "in [-2, 2]")
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    fits = math.isfinite(repetition) and repetition > 0.0
    _require("repetition_penalty", _short(repetition), fits, "finite and > 0")
    return SamplingParams(
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        temperature=temperature,
        top_p=top_p,
        top_k=max(message.top_k, 0),
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=_biases(message, vocab_size),
    )


def _biases(message: pb.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    count = len(message.logit_bias)
    _require_at_most("number of logit_bias entries", count, _MAX_BIASES, "logit_bias")
    for token, bias in message.logit_bias.items():
        below = f"below vocab_size, {vocab_size}"
        _require("logit_bias token id", token, token < vocab_size, below, "logit_bias")
        fits = -100.0 <= bias <= 100.0
        _require(f"logit_bias of token {token}", _short(bias), fits, "in [-100, 100]", "logit_bias")
    return tuple(message.logit_bias.items())


def completions_of(message: pb.SamplingParams, sampling: SamplingParams) -> list[SamplingParams]:
    """One for each of ``n`` completions; each has a seed of its own."""
    n = message.n if message.HasField("n") else 1
    _require("n", n, 1 <= n <= _MAX_N, f"from 1 to {_MAX_N}")
    fits = n == 1 or sampling.temperature >= _GREEDY
    _require("n", n, fits, f"1 where temperature is below {_GREEDY:g}: all would be the same")
    return [replace(sampling, seed=(sampling.seed + i) % 2**64) for i in range(n)]


def told_of(
    message: pb.ResponseOptions, sampling: SamplingParams, max_logprobs: int, has_tokenizer: bool
) -> tuple[SamplingParams, ResponseOptions]:
    """What an answer tells; log-probabilities are made where tokens are drawn."""
    counts: dict[str, int | None] = {}
    for name in ("logprobs", "prompt_logprobs"):
        counts[name] = getattr(message, name) if message.HasField(name) else None
        most = f"<= --max-logprobs, {max_logprobs}"
        _require(name, counts[name], (counts[name] or 0) <= max_logprobs, most)
    _require("echo", "set", has_tokenizer or not message.echo, "unset without a tokenizer", "echo")
    skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
    options = ResponseOptions(echo=message.echo, skip_special_tokens=skip)
    told = replace(sampling, logprobs=counts["logprobs"], prompt_logprobs=counts["prompt_logprobs"])
    return told, options


def check_priority(priority: int) -> int:
    """Refuses what is no number of a queue."""
    fits = -MAX_PRIORITY <= priority <= MAX_PRIORITY
    _require("priority", priority, fits, f"from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return priority


def kept_tokens(message: pb.GenerateRequest, limit: int, limit_name: str) -> int | None:
    """How many tokens of the prompt are used at most; None: all."""
    if not message.HasField("truncate_prompt_tokens"):
        return None
    kept, name = message.truncate_prompt_tokens, "truncate_prompt_tokens"
    _require(name, kept, kept >= 1 or kept == -1, ">= 1, or -1: what fits")
    _require_at_most_in(name, kept, limit - 1, limit_name)
    stop = message.stop_conditions
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else 1
    return kept if kept > 0 else max(limit - max_tokens, 1)


def stop_of(message: pb.StopConditions, room: int, model: ModelConfig) -> StopConditions:
    """Stop conditions; ``room`` is how many output tokens fit."""
    if message.HasField("max_tokens"):
        _require("max_tokens", message.max_tokens, message.max_tokens > 0, ">= 1")
        max_tokens = message.max_tokens
        most = f"<= max_tokens, {max_tokens}"
        _require("min_tokens", message.min_tokens, message.min_tokens <= max_tokens, most)
    else:
        max_tokens = room
    _require_at_most("number of stop strings", len(message.stop), _MAX_STOPS, "stop")
    _require("stop string", "empty", all(message.stop), "at least one character", "stop")
    longest = max(map(len, message.stop), default=0)
    _require_at_most("length of a stop string", longest, _MAX_STOP_LENGTH, "stop")
    count = len(message.stop_token_ids)
    _require_at_most("number of stop_token_ids", count, _MAX_STOP_TOKENS, "stop_token_ids")
    for token in message.stop_token_ids:
        fits = token < model.vocab_size
        below = f"below vocab_size, {model.vocab_size}"
        _require("stop_token_ids entry", token, fits, below, "stop_token_ids")
    eos = () if message.ignore_eos else model.eos_token_ids
    return StopConditions(
        max_tokens=min(max_tokens, room),
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset((*message.stop_token_ids, *eos)),
        include_stop_str_in_output=message.include_stop_str_in_output,
    )


def _short(value: float) -> str:
    """Protobuf floats are float32; their double expansion would only confuse."""
    return f"{value:.7g}"
