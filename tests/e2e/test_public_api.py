"""What a client sees that knows the service only by its descriptors, and how errors arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from neo_server.service_names import SERVICES
from protos import inference_pb2 as pb
from tests.helpers.server import RunningServer, request_of, running_server


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("api")
    with running_server(demo_model, folder, "--max-model-len", "256") as running:
        yield running


def test_a_client_that_knows_only_reflection_lists_the_services_and_generates(
    server: RunningServer,
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert {*SERVICES, "grpc.health.v1.Health"} <= services
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("neo.v1.Inference").FindMethodByName("Generate")
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            "/neo.v1.Inference/Generate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        request = request_class(text="The capital of France is")
        request.stop_conditions.max_tokens = 4
        request.sampling_params.temperature = 0.0
        replies = list(generate(request, timeout=60.0))
        assert "Paris" in "".join(reply.delta.text for reply in replies)


def test_the_server_describes_itself_and_its_model(server: RunningServer) -> None:
    model = server.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.architecture, model.vocab_size) == ("LlamaForCausalLM", 49152)
    assert list(model.eos_token_ids) == [2]
    assert model.has_chat_template
    info = server.info()
    assert info.max_model_len == 256
    assert [w.kind for w in info.workers].count(pb.WorkerInfo.KIND_CPU_ATTN) == 2
    assert server.health() == health_pb2.HealthCheckResponse.SERVING


BAD_REQUESTS = [
    pytest.param(pb.GenerateRequest(), ["prompt"], id="no prompt"),
    pytest.param(pb.GenerateRequest(text=""), ["prompt"], id="an empty prompt"),
    pytest.param(request_of([49152], 4), ["49152"], id="a token outside the vocabulary"),
    pytest.param(request_of([5] * 300, 4), ["300", "256"], id="longer than max_model_len"),
    pytest.param(request_of("a", 0), ["max_tokens", "0"], id="max_tokens 0"),
    pytest.param(request_of("a", 4, temperature=-1.0), ["temperature", "-1"], id="temperature"),
    pytest.param(request_of("a", 4, temperature=float("nan")), ["temperature", "nan"], id="nan"),
    pytest.param(request_of("a", 4, top_p=1.5), ["top_p", "1.5"], id="top_p"),
    pytest.param(request_of("a", 4, top_k=-2), ["top_k", "-2"], id="top_k"),
]


@pytest.mark.parametrize(("request_message", "words"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_field_and_harms_nobody(
    server: RunningServer, request_message: pb.GenerateRequest, words: list[str]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request_message, timeout=30.0))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for word in words:
        assert word in caught.value.details()
    assert len(server.generate(request_of("The", 3)).token_ids) == 3


def test_abort_is_idempotent_and_frees_the_caches(server: RunningServer) -> None:
    stream = server.stub.Generate(request_of("Once upon a time", 200, request_id="to-abort"))
    assert next(stream).HasField("prompt_info")
    next(stream)
    for _ in range(2):
        server.stub.Abort(pb.AbortRequest(request_id="to-abort"))
    assert list(stream)[-1].finish_info.reason == pb.FINISH_REASON_ABORT
    server.stub.Abort(pb.AbortRequest(request_id="never-heard-of"))
    server.assert_caches_end_empty()


def test_a_cancelled_stream_frees_the_caches(server: RunningServer) -> None:
    stream = server.stub.Generate(request_of("Once upon a time", 200))
    next(stream)
    next(stream)
    stream.cancel()
    server.assert_caches_end_empty()


def test_a_deadline_ends_the_request_and_frees_the_caches(server: RunningServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request_of("Once upon a time", 240), timeout=0.3))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    server.assert_caches_end_empty()


def test_a_stop_string_ends_the_text_before_it(server: RunningServer) -> None:
    request = request_of("One, two, three, four,", 40)
    free = server.generate(request).text
    stop = free[10:14]
    request.stop_conditions.stop.append(stop)
    result = server.generate(request)
    assert result.text == free[: free.index(stop)]
    assert result.finish.reason == pb.FINISH_REASON_STOP
    assert result.finish.stop_str == stop
