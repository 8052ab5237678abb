"""A server as a process of its own, over gRPC and the real rings; only the gpu worker is fake."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

SHM = Path("/dev/shm")
REPO = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Process:
    """A server and the fake gpu workers that a test starts for it."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.address_file = folder / "address"
        self.log_path = folder / "log"
        command = [
            *(sys.executable, "-m", "neo_server", "serve", str(model), "--device", "cpu"),
            *("--port", "0", "--control-port", "0", "--address-file", str(self.address_file)),
            *("--no-spawn-gpu-worker", "--cpu-attn-workers", "0", "--scheduling-policy", "mixed"),
            *("--kv-offloading-size", "0.002", "--num-gpu-blocks-override", "40", *flags),
        ]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPO)
        self.workers: list[subprocess.Popen[bytes]] = []
        listening = r"listening on (\S+), control on ([^\s\"]+)"
        try:
            found = self.until(lambda: re.search(listening, self.log_path.read_text()))
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.address, self.control = found.groups()
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpc.InferenceStub(self.channel)

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 30.0
        while not (value := condition()):
            assert self.process.poll() is None or time.monotonic() < deadline
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.02)
        return value

    def worker(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.helpers.fake_gpu_worker"]
        with self.log_path.open("ab") as log:
            worker = subprocess.Popen(
                [*command, "--server", self.control, *flags], stdout=log, stderr=log, cwd=REPO
            )
        self.workers.append(worker)
        return worker

    def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0).status)

    def loads(self) -> pb.GetLoadsResponse:
        return self.stub.GetLoads(pb.GetLoadsRequest(), timeout=10.0)

    def caches_are_empty(self) -> bool:
        loads = self.loads()
        return loads.num_used_gpu_blocks == loads.num_used_cpu_pages == 0

    def cpu_workers(self) -> int:
        info = self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0)
        return sum(worker.kind == pb.WorkerInfo.KIND_CPU_ATTN for worker in info.workers)

    def instance(self) -> str:
        return self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0).instance_id

    def close(self) -> None:
        self.channel.close()
        for process in (*self.workers, self.process):
            process.kill()
            process.wait()


def request_of(prompt: list[int], count: int, seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling_params=pb.SamplingParams(seed=seed),
        stop_conditions=pb.StopConditions(max_tokens=count, ignore_eos=True),
    )


def tokens_of(stream: Iterator[pb.GenerateResponse]) -> list[int]:
    return [token for message in stream for token in message.delta.token_ids]


def segments_of(instance: str) -> list[Path]:
    return [name for name in SHM.iterdir() if name.name.startswith(f"neo-{instance}-")]
