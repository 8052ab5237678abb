"""Health by grpc.health.v1, and what a drain does, of a server whose gpu worker is fake."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neo_server.service_names import SERVICES
from protos import inference_pb2 as pb
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import (
    NOT_SERVING,
    SERVING,
    Process,
    request_of,
    tokens_of,
)


def health_of(process: Process, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(process.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10.0).status)


def watch(process: Process) -> Iterator[health_pb2.HealthCheckResponse]:
    stub = health_pb2_grpc.HealthStub(process.channel)
    return iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60.0))


@pytest.fixture
def process(tiny_model: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(
        *(tiny_model, tmp_path, "--plan-timeout", "4", "--shutdown-timeout", "2"),
    )
    yield process
    process.close()


@pytest.fixture
def ready(process: Process) -> Process:
    process.worker()
    process.until(process.address_file.exists)
    return process


def test_every_service_has_a_status_and_who_watches_is_told(process: Process) -> None:
    states = watch(process)
    assert next(states).status == NOT_SERVING
    assert {health_of(process, name) for name in ("", *SERVICES)} == {NOT_SERVING}
    with pytest.raises(grpc.RpcError) as caught:
        health_of(process, "neo.v1.Nothing")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    process.worker()
    assert next(states).status == SERVING
    assert {health_of(process, name) for name in ("", *SERVICES)} == {SERVING}
    process.process.send_signal(signal.SIGTERM)
    assert next(states).status == NOT_SERVING
    assert process.process.wait(20.0) == 0


def test_a_gpu_worker_that_does_not_answer_is_not_serving_before_it_is_given_up(
    ready: Process,
) -> None:
    """--plan-timeout 4, and twice the 10 s of waiting for cpu workers: 24 s, of which an eighth."""
    states = watch(ready)
    assert next(states).status == SERVING
    os.kill(ready.workers[0].pid, signal.SIGSTOP)
    stream = ready.stub.Generate(request_of([1, 4], 20, seed=3), timeout=60.0)
    assert next(states).status == NOT_SERVING
    os.kill(ready.workers[0].pid, signal.SIGCONT)
    assert tokens_of(stream) == generate(3, [1, 4], 20)
    assert next(states).status == SERVING
    assert "did not answer" not in ready.log_path.read_text()


def test_a_policy_with_cpu_requests_only_needs_a_cpu_worker_that_lives(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--scheduling-policy", "fastdecode-plus", "--cpu-attn-workers", "1")
    process = Process(tiny_model, tmp_path, *flags)
    try:
        process.worker()
        process.until(process.address_file.exists)
        process.until(lambda: health_of(process, "") == SERVING)  # the cpu worker may start late
        states = watch(process)
        assert next(states).status == SERVING
        info = process.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0)
        (pid,) = (w.pid for w in info.workers if w.kind == pb.WorkerInfo.KIND_CPU_ATTN)
        os.kill(pid, signal.SIGSTOP)
        assert next(states).status == NOT_SERVING
        os.kill(pid, signal.SIGCONT)
        assert next(states).status == SERVING
        os.kill(pid, signal.SIGKILL)  # another follows
        assert next(states).status == NOT_SERVING
        assert next(states).status == SERVING
    finally:
        process.close()


def test_streams_that_outlive_the_shutdown_timeout_are_aborted(ready: Process) -> None:
    stream = ready.stub.Generate(request_of([1, 2], 150, 3), timeout=60.0)
    assert next(stream).HasField("prompt_info")
    os.kill(ready.workers[0].pid, signal.SIGSTOP)
    ready.process.send_signal(signal.SIGTERM)
    last = list(stream)[-1]
    assert last.finish_info.reason == pb.FINISH_REASON_ABORT
    os.kill(ready.workers[0].pid, signal.SIGCONT)
    assert ready.process.wait(20.0) == 0
    assert "1 requests aborted at shutdown" in ready.log_path.read_text()
