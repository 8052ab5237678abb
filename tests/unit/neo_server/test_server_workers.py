"""Workers that come, hang, end and are refused, seen from the server as a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from neo_server.cli import app
from protos import control_pb2, control_pb2_grpc
from protos import inference_pb2 as pb
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import (
    NOT_SERVING,
    SERVING,
    Process,
    request_of,
    tokens_of,
)


def test_a_lost_gpu_worker_is_followed_by_another_and_the_stream_goes_on(
    starting: Process,
) -> None:
    starting.worker("--die-at", "60")
    starting.until(starting.address_file.exists)
    streams = [
        starting.stub.Generate(request_of([i, 4], 100, seed=i), timeout=60.0) for i in range(4)
    ]
    assert starting.workers[0].wait(30.0) == 9
    starting.until(lambda: starting.health() == NOT_SERVING)
    starting.worker()
    for i, stream in enumerate(streams):
        assert tokens_of(stream) == generate(i, [i, 4], 100)
    starting.until(lambda: starting.health() == SERVING)
    starting.until(starting.caches_are_empty)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_a_gpu_worker_that_hangs_is_noticed_and_its_successor_goes_on(
    tiny_model: Path, tmp_path: Path, end: signal.Signals
) -> None:
    """One that wakes up, which a server cannot kill in another container, leaves by itself."""
    process = Process(*(tiny_model, tmp_path, "--plan-timeout", "0.5", "--cpu-attn-timeout", "1.5"))
    try:
        worker = process.worker()
        process.until(lambda: process.health() == SERVING)
        os.kill(worker.pid, signal.SIGSTOP)
        stream = process.stub.Generate(request_of([1, 4], 20, seed=3), timeout=120.0)
        next(stream)
        process.until(lambda: process.health() == NOT_SERVING)  # before it is given up
        process.until(lambda: "did not answer a plan" in process.log_path.read_text())
        worker.send_signal(end)
        assert worker.wait(30.0) == (-end if end == signal.SIGKILL else 0)
        process.worker()
        assert tokens_of(stream) == generate(3, [1, 4], 20)
        process.until(lambda: process.health() == SERVING)
    finally:
        process.close()


def test_a_worker_that_runs_gpu_plans_only_gets_no_others(tiny_model: Path, tmp_path: Path) -> None:
    process = Process(tiny_model, tmp_path)  # of a policy that places half of all on the CPU
    try:
        process.worker("--modes", "gpu_only")
        process.until(process.address_file.exists)
        info = process.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0)
        assert info.num_cpu_pages == process.loads().num_total_cpu_pages == 0
        streams = [process.stub.Generate(request_of([1, 4], 20, seed)) for seed in range(4)]
        for seed, stream in enumerate(streams):
            assert tokens_of(stream) == generate(seed, [1, 4], 20)
        kinds = {kind for kind, count in process.loads().iterations.items() if count}
        assert kinds == {"gpu_only"}
    finally:
        process.close()


def test_a_policy_with_cpu_requests_only_does_not_start_with_such_a_worker(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = Process(tiny_model, tmp_path, "--scheduling-policy", "simple-offload")
    try:
        process.worker("--modes", "gpu_only")
        assert process.process.wait(30.0) == 1
        said = process.log_path.read_text()
        assert "simple-offload; the gpu worker runs no plan with CPU-requests" in said
    finally:
        process.close()


def test_a_second_gpu_worker_is_refused_while_the_first_lives(server: Process) -> None:
    with grpc.insecure_channel(server.control) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.RegisterGpuWorker(control_pb2.RegisterGpuWorkerRequest(pid=1), timeout=10.0)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert tokens_of(server.stub.Generate(request_of([1], 4, 5))) == generate(5, [1], 4)


def test_more_workers_than_the_table_has_rows_are_refused(server: Process) -> None:
    arguments = ["scale", "--server", server.control, "--cpu-attn-workers", "1000"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "1000" in result.output


def test_a_server_that_runs_no_workers_does_not_scale_and_says_who_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--cpu-attn-workers", "2", "--no-spawn-cpu-attn-workers")
    process = Process(tiny_model, tmp_path, *flags)
    try:
        request = control_pb2.ScaleRequest(cpu_attn_workers=3)
        with (
            grpc.insecure_channel(process.control) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            control_pb2_grpc.ControlStub(channel).Scale(request, timeout=30.0)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        words = ("docker compose up", "--scale cpu-attn-worker=3", "--no-spawn-cpu-attn-workers")
        assert all(word in str(caught.value.details()) for word in words)
        assert process.cpu_workers() == 0
        process.worker()
        process.until(process.address_file.exists)
        assert tokens_of(process.stub.Generate(request_of([1], 4, 5))) == generate(5, [1], 4)
    finally:
        process.close()
