"""What is refused and how, and that an end at any moment frees everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from tests.helpers.server import RunningServer, request_of, running_server

MAX_LEN, MAX_SEQS = 512, 2
LONG = [5] * 480  # with a budget of 16 tokens: 30 iterations
INFINITE = float("inf")


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--scheduling-policy", "simple-offload", "--max-model-len", str(MAX_LEN)]
    flags += ["--max-num-seqs", str(MAX_SEQS), "--max-num-batched-tokens", "16", "--no-profile"]
    with running_server(demo_model, tmp_path_factory.mktemp("requests"), *flags) as running:
        yield running


def with_stop(**fields: Any) -> pb.GenerateRequest:
    request = request_of("a", 4)
    request.stop_conditions.MergeFrom(pb.StopConditions(**fields))
    return request


def with_(**fields: Any) -> pb.GenerateRequest:
    request = request_of("a", 4)
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


BAD = [
    (request_of("a", 4, temperature=INFINITE), ["temperature", "inf", "finite"]),
    (request_of("a", 4, top_p=-0.1), ["top_p", "-0.1", "(0, 1]"]),
    (request_of("a", 4, top_p=float("nan")), ["top_p", "nan", "(0, 1]"]),
    (request_of("a", 4, min_p=-INFINITE), ["min_p", "-inf", "[0, 1]"]),
    (request_of("a", 4, min_p=1.5), ["min_p", "1.5", "[0, 1]"]),
    (request_of("a", 4, presence_penalty=-2.5), ["presence_penalty", "-2.5", "[-2, 2]"]),
    (request_of("a", 4, frequency_penalty=INFINITE), ["frequency_penalty", "inf", "[-2, 2]"]),
    (request_of("a", 4, repetition_penalty=0.0), ["repetition_penalty", "0", "> 0"]),
    (request_of("a", 4, n=2), ["n is 2", "1 where temperature"]),
    (request_of("a", 4, n=200), ["n is 200", "128"]),
    (request_of([7, 49152], 4), ["token id", "49152", "vocab_size"]),
    (request_of([5] * MAX_LEN, 4), [str(MAX_LEN), "max_model_len"]),
    (request_of("", 4), ["prompt has 0 tokens", "at least 1"]),
    (request_of("x" * 5_000_000, 4), ["5000000 characters", "max_model_len"]),
    (request_of([5] * 1_000_000, 4), ["1000000 tokens", "max_model_len"]),
    (with_stop(stop=["x"] * 10_000), ["stop strings", "10000", "<= 64"]),
    (with_stop(stop=["x" * 5000]), ["stop string", "5000", "<= 1024"]),
    (with_stop(stop_token_ids=[50_000]), ["stop_token_ids", "50000", "vocab_size"]),
    (with_stop(min_tokens=9), ["min_tokens", "9", "max_tokens, 4"]),
    (with_(priority=2_000_000), ["priority", "2000000", "1000000"]),
    (with_(truncate_prompt_tokens=0), ["truncate_prompt_tokens", "0", ">= 1"]),
    (with_(response_options={"logprobs": 21}), ["logprobs", "21", "20"]),
    (with_(sampling_params={"logit_bias": {49152: 1.0}}), ["logit_bias", "49152", "vocab_size"]),
    (with_(sampling_params={"logit_bias": {5: -101.0}}), ["logit_bias", "-101", "[-100, 100]"]),
    (with_(request_id="x" * 300), ["request_id", "300", "256"]),
]


@pytest.mark.parametrize(("request_message", "words"), BAD, ids=[words[0] for _, words in BAD])
def test_what_is_wrong_is_refused_by_field_value_and_limit(
    server: RunningServer, request_message: pb.GenerateRequest, words: list[str]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request_message, timeout=60.0))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for word in words:
        assert word in caught.value.details()
    assert len(caught.value.details()) < 400


def test_text_that_is_no_utf8_is_refused_by_field_and_the_next_request_is_unharmed(
    server: RunningServer,
) -> None:
    raw = server.channel.unary_stream("/neo.v1.Inference/Generate")
    data = request_of("abX", 4).SerializeToString().replace(b"X", b"\xff")
    with pytest.raises(grpc.RpcError) as caught:
        list(raw(data, timeout=30.0))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "text has byte 0xff at 2" in caught.value.details()
    assert len(server.generate(request_of("The", 3)).token_ids) == 3
    server.assert_caches_end_empty()


End = Callable[[RunningServer, Any, str], None]


def abort(server: RunningServer, _stream: Any, request_id: str) -> None:
    server.stub.Abort(pb.AbortRequest(request_id=request_id))


def cancel(_server: RunningServer, stream: Any, _request_id: str) -> None:
    stream.cancel()


@pytest.mark.parametrize("end", [abort, cancel])
@pytest.mark.parametrize("phase", ["waiting", "chunked prefill", "decode on the cpu"])
def test_an_end_in_any_phase_frees_both_caches(server: RunningServer, phase: str, end: End) -> None:
    stream, decoys = None, []
    if phase == "waiting":
        decoys = [server.stub.Generate(request_of("One", 400)) for _ in range(MAX_SEQS)]
        server.wait_until(f"loads.num_running_reqs == {MAX_SEQS}")
    prompt: Any = "Once upon a time" if phase.startswith("decode") else LONG
    request_id = f"{phase} {end.__name__}"
    stream = server.stub.Generate(request_of(prompt, 30, request_id=request_id))
    assert next(stream).HasField("prompt_info")
    if phase == "waiting":
        server.wait_until("loads.num_waiting_reqs == 1")
    elif phase == "chunked prefill":
        server.wait_until("loads.num_used_cpu_pages > 0")
    else:
        next(stream)
        before = server.loads().num_cpu_decodes
        server.wait_until(f"loads.num_cpu_decodes > {before}")
    end(server, stream, request_id)
    server.wait_until(f"loads.num_waiting_reqs == 0 and loads.num_running_reqs == {len(decoys)}")
    for decoy in decoys:
        decoy.cancel()
    server.assert_caches_end_empty()


def test_a_client_that_is_gone_frees_both_caches(server: RunningServer) -> None:
    """Its connection ends, without a word."""
    channel = grpc.insecure_channel(server.address)
    generate = channel.unary_stream(
        "/neo.v1.Inference/Generate", request_serializer=pb.GenerateRequest.SerializeToString
    )
    stream = generate(request_of("Once upon a time", 400))
    next(stream)
    server.wait_until("loads.num_running_reqs == 1")
    threading.Thread(target=channel.close).start()
    server.wait_until("loads.num_running_reqs == 0")
    server.assert_caches_end_empty()


def test_a_deadline_ends_a_prefill_and_a_wait(server: RunningServer) -> None:
    decoys = [server.stub.Generate(request_of("One", 400)) for _ in range(MAX_SEQS - 1)]
    streams = [server.stub.Generate(request_of(LONG, 30), timeout=1.0) for _ in range(2)]
    for stream in streams:
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_until(f"loads.num_running_reqs == {len(decoys)} and loads.num_waiting_reqs == 0")
    for decoy in decoys:
        decoy.cancel()
    server.assert_caches_end_empty()
