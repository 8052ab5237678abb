from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from neo_server.errors import InvalidRequestError
from neo_server.params import SamplingParams, is_prompt, request_of
from protos import inference_pb2 as pb


def test_unset_parameters_leave_the_servers_defaults() -> None:
    assert SamplingParams().message() == pb.GenerateRequest()


def test_zero_is_not_unset() -> None:
    message = SamplingParams(temperature=0.0, seed=0, max_tokens=0, top_k=0).message()
    assert message.sampling_params.HasField("temperature")
    assert message.sampling_params.HasField("seed")
    assert message.sampling_params.HasField("top_k")
    assert message.stop_conditions.HasField("max_tokens")


def test_every_parameter_has_its_field_in_the_contract() -> None:
    values: dict[str, Any] = {field.name: 1 for field in fields(SamplingParams)}
    values |= {"stop": ["x", "y"], "stop_token_ids": [7], "logit_bias": {3: 0.5}}
    for name in ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens"):
        values[name] = True
    message = SamplingParams(**values).message()
    homes = (
        *(message, message.sampling_params, message.stop_conditions),
        message.response_options,
    )
    for name, value in values.items():
        (home,) = [one for one in homes if name in one.DESCRIPTOR.fields_by_name]
        found = getattr(home, name)
        assert type(value)(found) == value, name


def test_one_stop_string_is_not_a_list_of_letters() -> None:
    assert list(SamplingParams(stop="end").message().stop_conditions.stop) == ["end"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", 3]}, "stop"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": "\ud800"}, "stop"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": 1.0}, "logit_bias"),
        ({"n": "two"}, "n"),
        ({"echo": [1]}, "echo"),
    ],
)
def test_what_a_field_cannot_hold_is_refused_by_name(params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        SamplingParams(**params).message()
    assert caught.value.param == param


def test_a_prompt_is_a_text_token_ids_or_a_conversation() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert request_of("hi", request_id="a").text == "hi"
    assert request_of("hi", request_id="a").request_id == "a"
    assert list(request_of([3, 4]).token_ids.ids) == [3, 4]
    messages = request_of(turns).conversation.messages
    assert [(one.role, one.content) for one in messages] == [("user", "hi"), ("assistant", "ho")]


@pytest.mark.parametrize("prompt", ["\ud800", [-1], [2**32], [{"name": "x"}], [{"role": 3}]])
def test_an_impossible_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        request_of(prompt)


def test_one_prompt_is_told_from_several() -> None:
    turn = {"role": "user", "content": "hi"}
    for one in ("text", [1, 2], [turn]):
        assert is_prompt(one)
        assert not is_prompt([one, one])
    assert not is_prompt([])
