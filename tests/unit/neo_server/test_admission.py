from __future__ import annotations

from typing import Any

import grpc
import pytest

from neo_server import errors
from neo_server.admission import (
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
from neo_server.errors import InvalidRequestError
from neo_server.tokenizer import NoTokenizer
from protos import inference_pb2 as pb
from protos.model_config import parse_model_config
from tests.unit.neo_server.conftest import CONFIG

MODEL = parse_model_config(CONFIG, {})
VOCAB = MODEL.vocab_size


def test_defaults_are_those_of_the_contract() -> None:
    sampling = sampling_of(pb.SamplingParams(), VOCAB)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert sampling_of(pb.SamplingParams(), VOCAB).seed != sampling.seed
    stop = stop_of(pb.StopConditions(), room=30, model=MODEL)
    assert (stop.max_tokens, stop.min_tokens, stop.stop) == (30, 0, ())
    assert stop.stop_token_ids == {399}


def test_zeros_that_were_set_are_kept() -> None:
    sampling = sampling_of(pb.SamplingParams(temperature=0.0, seed=0, top_k=-1), VOCAB)
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.0, 0, 0)


def test_ignore_eos_keeps_the_clients_own_stop_tokens() -> None:
    message = pb.StopConditions(ignore_eos=True, stop_token_ids=[5])
    assert stop_of(message, 30, MODEL).stop_token_ids == {5}


def test_max_tokens_is_cut_to_the_room_there_is() -> None:
    assert stop_of(pb.StopConditions(max_tokens=99), 30, MODEL).max_tokens == 30


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.5}, ["temperature", "-0.5", ">= 0"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_p": 0.0}, ["top_p", "0", "(0, 1]"]),
        ({"top_p": 1.1}, ["top_p", "1.1"]),
        ({"top_p": float("nan")}, ["top_p", "nan"]),
        ({"min_p": -0.1}, ["min_p", "-0.1"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"presence_penalty": 2.5}, ["presence_penalty", "2.5", "[-2, 2]"]),
        ({"frequency_penalty": float("nan")}, ["frequency_penalty", "nan", "[-2, 2]"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "0", "> 0"]),
        ({"repetition_penalty": float("inf")}, ["repetition_penalty", "inf", "finite"]),
        ({"logit_bias": {400: 1.0}}, ["logit_bias", "400", "vocab_size"]),
        ({"logit_bias": {7: 101.0}}, ["logit_bias", "7", "101", "[-100, 100]"]),
        ({"logit_bias": {7: float("nan")}}, ["logit_bias", "nan"]),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, ["logit_bias", "301", "300"]),
    ],
)
def test_bad_sampling_is_refused_by_field_value_and_limit(
    fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        sampling_of(pb.SamplingParams(**fields), VOCAB)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens", "0", ">= 1"]),
        ({"max_tokens": 3, "min_tokens": 4}, ["min_tokens", "4", "3"]),
        ({"stop": ["a", ""]}, ["stop", "empty"]),
        ({"stop": ["a"] * 65}, ["stop", "65", "64"]),
        ({"stop": ["a", "b" * 1025]}, ["length of a stop string", "1025", "1024"]),
        ({"stop_token_ids": [1] * 1025}, ["number of stop_token_ids", "1025", "1024"]),
        ({"stop_token_ids": [400]}, ["stop_token_ids", "400"]),
    ],
)
def test_bad_stop_conditions_are_refused_by_field_value_and_limit(
    fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        stop_of(pb.StopConditions(**fields), 30, MODEL)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], ["prompt", "0 tokens"]),
        ([1, 400], ["400", "vocab_size"]),
        ([1] * 20, ["20 tokens", "max_model_len", "20 tokens"]),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(ids: list[int], words: list[str]) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        check_prompt(ids, 400, 20, "max_model_len")
    assert all(word in str(caught.value) for word in words)


def test_a_text_too_long_for_any_tokens_is_refused_by_its_length() -> None:
    check_text("x" * 100, 20, "max_model_len", longest_token=5)
    with pytest.raises(errors.InvalidRequestError) as caught:
        check_text("x" * 101, 20, "max_model_len", longest_token=5)
    assert all(word in str(caught.value) for word in ("text", "101", "max_model_len", "100"))


def test_the_longest_prompt_passes_and_request_ids_are_made_or_kept() -> None:
    check_prompt([399] * 19, 400, 20, "max_model_len")
    assert check_request_id("mine") == "mine"
    assert check_request_id("") != check_request_id("")
    with pytest.raises(errors.InvalidRequestError, match="257"):
        check_request_id("x" * 257)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.DuplicateRequestError, grpc.StatusCode.ALREADY_EXISTS),
        (errors.OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.NotReadyError, grpc.StatusCode.UNAVAILABLE),
        (errors.ShuttingDownError, grpc.StatusCode.UNAVAILABLE),
        (errors.PlanError, grpc.StatusCode.INTERNAL),
    ],
)
def test_each_error_has_its_status(error: type[errors.NeoError], code: grpc.StatusCode) -> None:
    assert errors.to_status(error("why")) == (code, "why")


def test_without_a_tokenizer_text_and_stop_strings_are_refused() -> None:
    check_stop_strings(("x",), True)
    check_stop_strings((), False)
    with pytest.raises(InvalidRequestError, match=r"stop strings is 1.*0 without a tokenizer"):
        check_stop_strings(("x",), False)
    with pytest.raises(InvalidRequestError, match="token_ids"):
        NoTokenizer().encode("text")
    detokenizer = NoTokenizer().detokenizer()
    assert (detokenizer.feed(1), detokenizer.flush()) == ("", "")


def test_completions_draw_from_seeds_of_their_own() -> None:
    message = pb.SamplingParams(n=3, seed=2**64 - 1)
    made = completions_of(message, sampling_of(message, VOCAB))
    assert [sampling.seed for sampling in made] == [2**64 - 1, 0, 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, ["n is 0", "1 to 128"]),
        ({"n": 129}, ["n is 129", "1 to 128"]),
        ({"n": 2, "temperature": 0.0}, ["n is 2", "temperature", "1e-05"]),
    ],
)
def test_a_number_of_completions_that_makes_no_sense_is_refused(
    fields: dict[str, Any], words: list[str]
) -> None:
    message = pb.SamplingParams(**fields)
    with pytest.raises(InvalidRequestError) as caught:
        completions_of(message, sampling_of(message, VOCAB))
    assert all(word in str(caught.value) for word in words)


def test_logprobs_have_a_limit_and_zero_is_not_none() -> None:
    plain = sampling_of(pb.SamplingParams(), VOCAB)
    told, options = told_of(pb.ResponseOptions(logprobs=0), plain, 20, has_tokenizer=True)
    assert (told.logprobs, told.prompt_logprobs, options.skip_special_tokens) == (0, None, True)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError, match=rf"{name} is 21; .*--max-logprobs, 20"):
            told_of(pb.ResponseOptions(**{name: 21}), plain, 20, has_tokenizer=True)
    with pytest.raises(InvalidRequestError, match="echo"):
        told_of(pb.ResponseOptions(echo=True), plain, 20, has_tokenizer=False)


def test_a_priority_beyond_the_queues_numbers_is_refused() -> None:
    assert check_priority(-1_000_000) == -1_000_000
    with pytest.raises(InvalidRequestError, match="priority is 1000001"):
        check_priority(1_000_001)


def test_a_prompt_is_cut_to_what_was_asked_for_or_to_what_fits() -> None:
    stop = pb.StopConditions(max_tokens=10)
    for message, kept in (
        (pb.GenerateRequest(), None),
        (pb.GenerateRequest(truncate_prompt_tokens=5), 5),
        (pb.GenerateRequest(truncate_prompt_tokens=-1), 31),
        (pb.GenerateRequest(truncate_prompt_tokens=-1, stop_conditions=stop), 22),
    ):
        assert kept_tokens(message, 32, "max_model_len") == kept
    for wrong in (0, -2, 32):
        message = pb.GenerateRequest(truncate_prompt_tokens=wrong)
        with pytest.raises(InvalidRequestError, match=f"truncate_prompt_tokens is {wrong}"):
            kept_tokens(message, 32, "max_model_len")
