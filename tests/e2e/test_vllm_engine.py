"""The gateway's protocol on the demo model: what it asks for beside tokens equals our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2 as own
from protos import vllm_engine_pb2 as pb
from protos import vllm_engine_pb2_grpc as rpc
from tests.helpers.server import RunningServer, running_server

PROMPT = "The capital of France is"
COUNT = 6


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--max-model-len", "256", "--no-profile", "--kv-offloading-size", "0.05")
    with running_server(demo_model, tmp_path_factory.mktemp("gateway"), *flags) as running:
        yield running


def answers(server: RunningServer, stream: bool, **params: Any) -> list[pb.GenerateResponse]:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    sampling.MergeFrom(pb.SamplingParams(**params))
    request = pb.GenerateRequest(text=PROMPT, sampling_params=sampling, stream=stream)
    return list(rpc.VllmEngineStub(server.channel).Generate(request, timeout=120.0))


@pytest.fixture(scope="module")
def told(server: RunningServer) -> tuple[list[Any], list[Any]]:
    """Log-probabilities of the prompt and of the output, as ``neo.v1.Inference`` tells them."""
    request = own.GenerateRequest(text=PROMPT)
    request.sampling_params.temperature = 0.0
    request.stop_conditions.max_tokens = COUNT
    request.stop_conditions.ignore_eos = True
    request.response_options.logprobs = request.response_options.prompt_logprobs = 2
    prompt: list[Any] = []
    output: list[Any] = []
    for message in server.stub.Generate(request, timeout=120.0):
        prompt.extend(message.prompt_logprobs.tokens)
        output.extend(message.delta.logprobs)
    assert len(output) == COUNT
    assert not prompt[0].HasField("logprob")
    return prompt, output


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_our_own_protocol(
    server: RunningServer, told: tuple[list[Any], list[Any]], stream: bool
) -> None:
    *chunks, last = answers(server, stream, logprobs=2, prompt_logprobs=2)
    parts = [one.chunk for one in chunks] if stream else [last.complete]
    assert bool(chunks) == stream
    found = [
        (token, value, list(top.token_ids), list(top.values))
        for part in parts
        for token, value, top in zip(
            part.output_logprobs.token_ids,
            part.output_logprobs.token_logprobs,
            part.output_logprobs.top_logprobs,
            strict=True,
        )
    ]
    prompt, output = told
    assert [token for token, *_ in found] == [entry.token_id for entry in output]
    for (_, value, ids, values), entry in zip(found, output, strict=True):
        assert value == pytest.approx(entry.logprob, abs=1e-3)
        assert ids == [top.token_id for top in entry.top]
        assert values == pytest.approx([top.logprob for top in entry.top], abs=1e-3)
    assert [part.HasField("input_logprobs") for part in parts] == [True, *[False] * len(parts[1:])]
    given = parts[0].input_logprobs
    assert list(given.token_ids) == [entry.token_id for entry in prompt]
    assert [one.HasField("value") for one in given.token_logprobs] == [
        entry.HasField("logprob") for entry in prompt
    ]
    assert [one.value for one in given.token_logprobs] == pytest.approx(
        [entry.logprob for entry in prompt], abs=1e-3
    )
    assert len(given.top_logprobs) == len(prompt)


def test_without_alternatives_each_token_has_its_own_alone(server: RunningServer) -> None:
    (answer,) = answers(server, False, logprobs=0)
    told = answer.complete.output_logprobs
    assert len(told.token_logprobs) == COUNT
    assert len(told.top_logprobs) == 0
    assert not answer.complete.HasField("input_logprobs")
    (plain,) = answers(server, False)
    assert not plain.complete.HasField("output_logprobs")


def test_biases_and_penalties_reach_the_sampler(server: RunningServer) -> None:
    (plain,) = answers(server, False)
    first = plain.complete.output_ids[0]
    (biased,) = answers(server, False, logit_bias={first: -100.0})
    assert biased.complete.output_ids[0] != first
    (repeated,) = answers(server, False, logit_bias={first: 50.0})
    assert set(repeated.complete.output_ids) == {first}
    (varied,) = answers(server, False, logit_bias={first: 50.0}, repetition_penalty=100.0)
    assert len(set(varied.complete.output_ids)) > 1
