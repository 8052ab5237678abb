"""Health of a real server whose own workers stop and die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from tests.helpers.server import request_of, running_server

STATUS = health_pb2.HealthCheckResponse
FLAGS = ("--num-gpu-blocks-override", "64", "--kv-offloading-size", "0.1", "--no-profile")


def test_a_gpu_worker_that_is_stopped_or_killed_is_not_serving_until_it_is_back(
    demo_model: Path, tmp_path: Path
) -> None:
    with running_server(demo_model, tmp_path, *FLAGS, "--cpu-attn-workers", "1") as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        states = iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=120.0))
        assert next(states).status == STATUS.SERVING
        before = server.generate(request_of("One, two, three", 8)).token_ids
        (pid,) = (w.pid for w in server.info().workers if w.kind == pb.WorkerInfo.KIND_GPU)
        os.kill(pid, signal.SIGSTOP)
        assert next(states).status == STATUS.NOT_SERVING
        os.kill(pid, signal.SIGCONT)
        assert next(states).status == STATUS.SERVING
        os.kill(pid, signal.SIGKILL)
        assert next(states).status == STATUS.NOT_SERVING
        assert next(states).status == STATUS.SERVING
        assert server.generate(request_of("One, two, three", 8)).token_ids == before
