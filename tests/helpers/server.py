"""A real server with its worker processes, and a client for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

REPO = Path(__file__).resolve().parent.parent.parent
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 240.0


@dataclass
class Generation:
    """What one request returned."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    finish: pb.FinishInfo = field(default_factory=pb.FinishInfo)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)


def request_of(
    prompt: str | Sequence[int], max_tokens: int, request_id: str = "", **sampling: float
) -> pb.GenerateRequest:
    """A greedy request that ignores end-of-sequence, unless ``sampling`` says otherwise."""
    ignore_eos = bool(sampling.pop("ignore_eos", True))
    request = pb.GenerateRequest(
        request_id=request_id,
        sampling_params=pb.SamplingParams(**{"temperature": 0.0, **sampling}),
        stop_conditions=pb.StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


class RunningServer:
    """One ``neo serve`` process tree and a channel to it."""

    def __init__(self, model: Path, folder: Path, *arguments: str, device: str = "cpu") -> None:
        self.address_file = folder / f"address-{time.monotonic_ns()}"
        self.log_path = folder / f"server-{time.monotonic_ns()}.log"
        command = [
            *(sys.executable, "-m", "neo_server", "serve", str(model), "--device", device),
            *("--port", "0", "--control-port", "0", "--address-file", str(self.address_file)),
            *arguments,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=REPO
            )
        self._workers: list[subprocess.Popen[bytes]] = []
        self.http_address = ""  # with --http-port
        try:
            self.address, self.control_address = self._wait_until_serving()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpc.InferenceStub(self.channel)

    def _wait_until_serving(self) -> tuple[str, str]:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server exit {self.process.returncode}:\n{self.log()}")
            if self.address_file.exists():
                address, control, *http = self.address_file.read_text().split()
                self.http_address = "".join(http)
                if self.health(address) == health_pb2.HealthCheckResponse.SERVING:
                    return address, control
            time.sleep(0.05)
        raise RuntimeError(f"server not ready in {START_TIMEOUT_S} s:\n{self.log()}")

    def health(self, address: str | None = None) -> int:
        """Status by grpc.health.v1; UNKNOWN while it does not answer."""
        with grpc.insecure_channel(address or self.address) as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0).status)
            except grpc.RpcError:
                return int(health_pb2.HealthCheckResponse.UNKNOWN)

    def log(self) -> str:
        """Everything the server and its children printed."""
        return self.log_path.read_text(errors="replace")

    def generate(self, request: pb.GenerateRequest) -> Generation:
        """Streams one request to its end and checks the order of its messages."""
        result = Generation()
        messages = list(self.stub.Generate(request, timeout=REQUEST_TIMEOUT_S))
        assert messages[0].HasField("prompt_info")
        assert messages[-1].HasField("finish_info")
        result.num_prompt_tokens = messages[0].prompt_info.num_prompt_tokens
        for message in messages[1:-1]:
            if message.HasField("prompt_logprobs"):
                result.prompt_logprobs.extend(message.prompt_logprobs.tokens)
                continue
            assert message.HasField("delta")
            result.logprobs.extend(message.delta.logprobs)
            result.deltas.append(message.delta.text)
            result.token_ids.extend(message.delta.token_ids)
        result.text = "".join(result.deltas)
        result.finish = messages[-1].finish_info
        return result

    def generate_all(self, requests: Sequence[pb.GenerateRequest]) -> list[Generation]:
        """All at once; results in order."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.generate, requests))

    def loads(self) -> pb.GetLoadsResponse:
        """Counters and cache occupation."""
        return self.stub.GetLoads(pb.GetLoadsRequest(), timeout=10.0)

    def info(self) -> pb.GetServerInfoResponse:
        """Configuration and workers."""
        return self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0)

    def cpu_worker_pids(self) -> list[int]:
        """Pids of the registered cpu-attention workers."""
        return [w.pid for w in self.info().workers if w.kind == pb.WorkerInfo.KIND_CPU_ATTN]

    def wait_until(self, condition: str, timeout_s: float = 30.0) -> None:
        """Waits for an expression over ``loads`` and ``info``; fails with both printed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            names = {"loads": self.loads(), "info": self.info(), "pb": pb}
            if eval(condition, names):
                return
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s: {condition}\n{names}\n{self.log()}")

    def wait_for_log(self, text: str, timeout_s: float = 30.0) -> None:
        """Waits for ``text`` in the log; a process may register before it has printed it."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            if time.monotonic() > deadline:
                raise AssertionError(f"not printed within {timeout_s} s: {text}\n{self.log()}")
            time.sleep(0.05)

    def assert_caches_end_empty(self) -> None:
        """Waits for both caches to be free again."""
        self.wait_until("loads.num_used_gpu_blocks == 0 and loads.num_used_cpu_pages == 0")

    def start_worker(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A cpu-attention worker started by hand."""
        command = [sys.executable, "-m", "cpu_attn_worker", "--server", self.control_address]
        with self.log_path.open("ab") as log:
            worker = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, cwd=REPO)
        self._workers.append(worker)
        return worker

    def stop(self) -> None:
        """Ends everything; safe to call twice."""
        self.channel.close()
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signal.SIGCONT)
                worker.kill()
            worker.wait()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"SIGTERM did not end the server:\n{self.log()}") from None


@contextlib.contextmanager
def running_server(
    model: Path, folder: Path, *arguments: str, device: str = "cpu"
) -> Iterator[RunningServer]:
    """A server for the length of a ``with`` block."""
    server = RunningServer(model, folder, *arguments, device=device)
    try:
        yield server
    finally:
        server.stop()
