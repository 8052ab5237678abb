"""The gateway's protocol, by a client that is generated from protos/vllm_engine.proto."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from neo_server.admission import sampling_of
from neo_server.vllm_request import generate_request
from protos import smg_common_pb2 as common
from protos import vllm_engine_pb2 as pb
from protos import vllm_engine_pb2_grpc as rpc
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import Process
from tests.unit.neo_server.test_tokenizer import byte_level


class Client:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.stub = rpc.VllmEngineStub(process.channel)

    def generate(
        self, request: pb.GenerateRequest
    ) -> tuple[list[pb.GenerateStreamChunk], pb.GenerateComplete]:
        """Chunks, and the complete that is last."""
        *chunks, last = self.stub.Generate(request, timeout=60.0)
        assert last.WhichOneof("response") == "complete"
        assert all(one.WhichOneof("response") == "chunk" for one in chunks)
        return [one.chunk for one in chunks], last.complete


def request_of(
    ids: list[int], count: int, seed: int, stream: bool = False, **params: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(
            max_tokens=count, seed=seed, **{"ignore_eos": True, **params}
        ),
        stream=stream,
    )


@pytest.fixture(scope="module")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    process = Process(tiny_model, tmp_path_factory.mktemp("gateway"))
    process.worker()
    process.until(process.address_file.exists)
    yield Client(process)
    process.close()


def test_without_stream_there_is_one_complete(client: Client) -> None:
    chunks, complete = client.generate(request_of([1, 2, 3], 30, seed=7))
    assert chunks == []
    assert list(complete.output_ids) == generate(7, [1, 2, 3], 30)
    assert (complete.prompt_tokens, complete.completion_tokens) == (3, 30)
    assert complete.finish_reason == "length"
    assert complete.WhichOneof("matched_stop") is None


def test_a_stream_has_deltas_and_its_complete_repeats_the_last(client: Client) -> None:
    chunks, complete = client.generate(request_of([1, 2, 3], 30, seed=7, stream=True))
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == generate(7, [1, 2, 3], 30)
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in chunks)
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    assert list(complete.output_ids) == list(chunks[-1].token_ids)
    assert complete.completion_tokens == len(complete.output_ids)
    assert complete.prompt_tokens == 3


def test_several_completions_are_told_apart_by_their_index(client: Client) -> None:
    for stream in (False, True):
        answers = client.stub.Generate(request_of([8, 8], 12, seed=40, stream=stream, n=3))
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends = []
        for answer in answers:
            part = answer.chunk if answer.HasField("chunk") else answer.complete
            if answer.HasField("complete"):
                ends.append(part.index)
                found[part.index] += [] if stream else part.output_ids
            else:
                found[part.index] += part.token_ids
        assert sorted(ends) == [0, 1, 2]
        assert found == {i: generate(40 + i, [8, 8], 12) for i in range(3)}


def test_a_prompt_is_cut_to_its_end(client: Client) -> None:
    _, complete = client.generate(request_of([1, 2, 3, 4, 5], 6, seed=2, truncate_prompt_tokens=2))
    assert complete.prompt_tokens == 2
    assert list(complete.output_ids) == generate(2, [4, 5], 6)


def test_text_is_tokenised_as_any_prompt_and_a_negative_seed_is_one_of_its_own(
    client: Client,
) -> None:
    ids = byte_level().encode("the fox")
    request = request_of([], 12, seed=-1)
    request.text = "the fox"
    _, complete = client.generate(request)
    assert complete.prompt_tokens == len(ids)
    assert list(complete.output_ids) == generate(2**64 - 1, ids, 12)


def test_what_stopped_it_is_told_unless_it_is_the_models_own_end(client: Client) -> None:
    tokens = generate(5, [9, 9], 40)
    stop = tokens[12]
    assert stop not in tokens[:12]
    _, complete = client.generate(request_of([9, 9], 40, seed=5, stop_token_ids=[stop]))
    assert complete.finish_reason == "stop"
    assert complete.matched_token_id == stop
    assert list(complete.output_ids) == tokens[:13]
    text = byte_level().decode(tokens)
    found = next(part for part in text if text.index(part) > 3 and part.isascii())
    _, complete = client.generate(request_of([9, 9], 40, seed=5, stop=[found]))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", found)
    assert complete.completion_tokens < 40


def test_unset_means_a_temperature_and_top_p_of_one() -> None:
    message = pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(seed=1))
    found = sampling_of(generate_request(message).sampling_params, 400)
    assert (found.repetition_penalty, found.presence_penalty) == (1.0, 0.0)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1.0, 1.0, 0, 0.0)
    message.sampling_params.temperature = 0.0
    assert sampling_of(generate_request(message).sampling_params, 400).temperature == 0.0
    assert not generate_request(message).stop_conditions.HasField("max_tokens")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"frequency_penalty": 2.5}, ["frequency_penalty is 2.5"]),
        ({"presence_penalty": float("nan")}, ["presence_penalty is nan"]),
        ({"repetition_penalty": -1.0}, ["repetition_penalty is -1"]),
        ({"n": 129}, ["n is 129"]),
        ({"n": 2, "temperature": 0.0}, ["n is 2", "temperature"]),
        ({"logprobs": -1}, ["logprobs is -1"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs is 21", "--max-logprobs, 20"]),
        ({"logit_bias": {-3: 1.0}}, ["logit_bias token id is -3"]),
        ({"logit_bias": {400: 1.0}}, ["logit_bias token id is 400"]),
        ({"truncate_prompt_tokens": -2}, ["truncate_prompt_tokens is -2"]),
        ({"json_schema": "{}"}, ["json_schema"]),
        ({"json_object": True}, ["json_object is True"]),
        ({"choice": {"choices": ["a"]}}, ["choice", "a"]),
        ({"temperature": float("nan")}, ["temperature is nan"]),
        ({"top_p": 1.5}, ["top_p is 1.5"]),
        ({"top_k": 2**31}, ["top_k", str(2**31)]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"stop_token_ids": [400]}, ["stop_token_ids", "400"]),
    ],
)
def test_what_this_server_does_not_do_is_refused_by_name(
    client: Client, params: dict[str, Any], words: list[str]
) -> None:
    request = request_of([1, 2], 5, seed=1)
    request.sampling_params.MergeFrom(pb.SamplingParams(**params))
    refused(client, request, words)
    _, complete = client.generate(request_of([1, 2], 5, seed=1))
    assert list(complete.output_ids) == generate(1, [1, 2], 5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, ["mm_inputs"]),
        ({"kv_transfer_params": pb.KvTransferParams(remote_host="h")}, ["kv_transfer_params"]),
        ({"kv_transfer_params_json": "{}"}, ["kv_transfer_params_json"]),
        ({"data_parallel_rank": 1}, ["data_parallel_rank is 1"]),
        ({"tokenized": pb.TokenizedInput()}, ["prompt has 0 tokens"]),
        ({"tokenized": pb.TokenizedInput(input_ids=[400])}, ["token id", "400"]),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(
    client: Client, fields: dict[str, Any], words: list[str]
) -> None:
    request = request_of([1, 2], 5, seed=1)
    for name, value in fields.items():
        request.ClearField(name)
        request.MergeFrom(pb.GenerateRequest(**{name: value}))
    refused(client, request, words)
    refused(client, pb.GenerateRequest(request_id="r"), ["input is unset"])


def refused(client: Client, request: pb.GenerateRequest, words: list[str]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(request, timeout=10.0))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in caught.value.details() for word in words), caught.value.details()


def test_abort_and_cancel_free_both_caches(client: Client) -> None:
    process = client.process
    os.kill(process.workers[0].pid, signal.SIGSTOP)
    requests = [request_of([i, 4], 200, seed=i, stream=True) for i in range(4)]
    for i, request in enumerate(requests):
        request.request_id = f"gateway-{i}"
    streams = [client.stub.Generate(request, timeout=60.0) for request in requests]
    process.until(lambda: process.loads().num_running_reqs + process.loads().num_waiting_reqs == 4)
    assert client.stub.GetServerInfo(pb.GetServerInfoRequest()).active_requests == 4
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(requests[0], timeout=10.0))
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    ids = [request.request_id for request in requests[:2]]
    client.stub.Abort(pb.AbortRequest(request_ids=[*ids, "unknown"]), timeout=10.0)
    for stream in streams[:2]:
        assert list(stream)[-1].complete.finish_reason == "abort"
    for stream in streams[2:]:
        stream.cancel()
    os.kill(process.workers[0].pid, signal.SIGCONT)
    process.until(process.caches_are_empty)
    assert process.loads().num_running_reqs == process.loads().num_waiting_reqs == 0


def test_the_gateway_learns_of_the_model_the_server_and_its_load(
    client: Client, tiny_model: Path
) -> None:
    health = client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=10.0)
    assert (health.healthy, health.message) == (True, "serving")
    model = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10.0)
    assert model.is_generation
    assert not model.supports_vision
    assert model.model_path == model.tokenizer_path == model.served_model_name == str(tiny_model)
    assert (model.max_context_length, model.max_req_input_len) == (256, 255)
    assert (model.vocab_size, list(model.eos_token_ids)) == (400, [399])
    assert (model.model_type, list(model.architectures)) == ("llama", ["LlamaForCausalLM"])
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0)
    assert info.data_parallel_size == 1
    assert info.uptime_seconds > 0
    loads = client.stub.GetLoads(pb.GetLoadsRequest(), timeout=10.0)
    (load,) = loads.loads
    assert loads.dp_rank_count == 1
    own = client.process.loads()
    assert load.max_total_num_tokens == own.max_total_num_tokens + own.max_total_num_cpu_tokens
    assert load.max_running_requests == own.max_running_reqs
    assert not client.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=10.0).loads


def test_the_tokenizer_comes_as_an_archive(client: Client, tiny_model: Path) -> None:
    chunks = list(client.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10.0))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted(archive.namelist()) == ["config.json", "tokenizer.json"]
        assert archive.read("tokenizer.json") == (tiny_model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("method", ["Embed", "SubscribeKvEvents"])
def test_what_is_not_served_is_unimplemented(client: Client, method: str) -> None:
    call = client.process.channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"", timeout=10.0))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
