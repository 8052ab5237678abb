"""The whole server as a process, over gRPC and the real rings; only the gpu worker is fake."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from neo_server.cli import app
from protos import control_pb2, control_pb2_grpc
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.test_tokenizer import byte_level

SHM = Path("/dev/shm")
REPO = Path(__file__).resolve().parents[3]
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


@pytest.fixture
def starting(tiny_model: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(tiny_model, tmp_path)
    yield process
    process.close()


@pytest.fixture
def server(starting: Process) -> Process:
    starting.worker()
    starting.until(starting.address_file.exists)
    return starting


def test_it_serves_only_after_the_gpu_worker_is_ready_and_warm(starting: Process) -> None:
    assert starting.health() == NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        list(starting.stub.Generate(request_of([1], 4, 0), timeout=10.0))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not starting.address_file.exists()
    starting.worker()
    starting.until(starting.address_file.exists)
    starting.until(lambda: starting.health() == SERVING)
    assert starting.address_file.read_text() == f"{starting.address} {starting.control}\n"
    assert "ready" in starting.log_path.read_text()
    assert starting.loads().num_output_tokens == 0


def test_streams_carry_the_right_tokens_through_the_rings(server: Process) -> None:
    requests = [request_of([i, 2, 3], 40, seed=i) for i in range(30)]
    streams = [server.stub.Generate(request, timeout=60.0) for request in requests]
    for i, stream in enumerate(streams):
        assert tokens_of(stream) == generate(i, [i, 2, 3], 40)
    loads = server.loads()
    assert min(loads.num_gpu_decodes, loads.num_cpu_decodes) > 0
    assert loads.iterations["two_batches"] > 0
    assert loads.gen_throughput > 0
    server.until(server.caches_are_empty)


def test_text_is_tokenised_and_counted(server: Process) -> None:
    messages = list(server.stub.Generate(pb.GenerateRequest(text="the fox"), timeout=60.0))
    assert messages[0].prompt_info.num_prompt_tokens > 2
    finish = messages[-1].finish_info
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert finish.num_prompt_tokens + finish.num_output_tokens == 256


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


def test_gpu_only_serves_without_cpu_cache_and_cpu_workers(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = Process(
        *(tiny_model, tmp_path, "--scheduling-policy", "gpu-only", "--kv-offloading-size", "0")
    )
    try:
        process.worker()
        process.until(process.address_file.exists)
        assert process.loads().num_total_cpu_pages == 0
        assert tokens_of(process.stub.Generate(request_of([1, 4], 20, 3))) == generate(
            3, [1, 4], 20
        )
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": "x" * 100_000}, ["text", "100000", "max_model_len", "256"]),
        ({"text": "x" * 5_000_000}, ["text", "5000000", "max_model_len", "256"]),
        ({"token_ids": pb.TokenIds(ids=[70_000] * 5_000_000)}, ["5000000", "max_model_len"]),
        ({"token_ids": pb.TokenIds(ids=[1] * 300)}, ["300", "max_model_len", "256"]),
    ],
)
def test_a_prompt_that_cannot_fit_is_an_invalid_argument(
    server: Process, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(pb.GenerateRequest(**fields), timeout=30.0))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in str(caught.value.details()) for word in words)


def test_a_start_without_a_tokenizer_leaves_no_segments(tiny_model: Path, tmp_path: Path) -> None:
    model, shm = tmp_path / "model", tmp_path / "shm"
    for folder in (model, shm):
        folder.mkdir()
    (model / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    command = [sys.executable, "-m", "neo_server", "serve", str(model), "--device", "cpu"]
    flags = ["--port", "0", "--control-port", "0", "--shm-dir", str(shm)]
    done = subprocess.run(
        [*command, *flags], cwd=REPO, capture_output=True, text=True, timeout=60.0
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("neo: no tokenizer.json in")
    assert list(shm.iterdir()) == []


def test_tokens_of_a_text_and_back(server: Process) -> None:
    text = "the fox é 안녕"
    ids = server.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids
    plain = pb.TokenizeRequest(text=text, add_special_tokens=False)
    assert list(ids) == [1, *server.stub.Tokenize(plain).token_ids]
    back = pb.DetokenizeRequest(token_ids=ids)
    assert server.stub.Detokenize(back).text == text
    back.skip_special_tokens = False
    assert server.stub.Detokenize(back).text == f"<s>{text}"
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5, 400]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in caught.value.details() for word in ("400", "vocab_size"))


def test_a_deadline_also_ends_a_request_that_waits(tiny_model: Path, tmp_path: Path) -> None:
    process = Process(tiny_model, tmp_path, "--max-num-seqs", "1")
    try:
        process.worker()
        process.until(process.address_file.exists)
        os.kill(process.workers[0].pid, signal.SIGSTOP)
        first = process.stub.Generate(request_of([1], 8, 0), timeout=60.0)
        next(first)
        process.until(lambda: process.loads().num_running_reqs == 1)
        with pytest.raises(grpc.RpcError) as caught:
            list(process.stub.Generate(request_of([2], 8, 0), timeout=0.5))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        process.until(lambda: process.loads().num_waiting_reqs == 0)
        assert process.loads().num_running_reqs == 1
        os.kill(process.workers[0].pid, signal.SIGCONT)
        assert tokens_of(first) == generate(0, [1], 8)
        process.until(process.caches_are_empty)
    finally:
        process.close()


def test_with_an_api_key_only_health_answers_without_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tiny_model, tmp_path, "--api-key", "sesame", "--cpu-attn-workers", "1")
    try:
        assert process.worker().wait(30.0) != 0  # without the key
        monkeypatch.setenv("NEO_API_KEY", "sesame")
        process.worker()
        process.until(process.address_file.exists)
        process.until(lambda: process.health() == SERVING)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "sesame"),)):
            for call in (
                lambda given: list(process.stub.Generate(request_of([1], 4, 5), metadata=given)),
                lambda given: process.stub.GetLoads(pb.GetLoadsRequest(), metadata=given),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call(metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert "sesame" not in caught.value.details()
        key = (("authorization", "Bearer sesame"),)
        stream = process.stub.Generate(request_of([1], 4, 5), metadata=key)
        assert tokens_of(stream) == generate(5, [1], 4)
        process.until(
            lambda: process.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=key).workers[1:]
        )
        arguments = ["scale", "--server", process.control, "--cpu-attn-workers", "0"]
        refused = CliRunner().invoke(app, [*arguments, "--api-key", "wrong"])
        assert (refused.exit_code, "UNAUTHENTICATED" in refused.output) == (1, True)
        assert CliRunner().invoke(app, arguments).exit_code == 0
        arguments = ["generate", "the fox", "--server", process.address, "--max-tokens", "2"]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        assert "sesame" not in process.log_path.read_text()
    finally:
        process.close()


def test_a_second_gpu_worker_is_refused_while_the_first_lives(server: Process) -> None:
    with grpc.insecure_channel(server.control) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.RegisterGpuWorker(control_pb2.RegisterGpuWorkerRequest(pid=1), timeout=10.0)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert tokens_of(server.stub.Generate(request_of([1], 4, 5))) == generate(5, [1], 4)


@pytest.mark.parametrize("way", ["cancel", "abort", "deadline"])
def test_a_request_that_ends_early_frees_both_caches(server: Process, way: str) -> None:
    os.kill(server.workers[0].pid, signal.SIGSTOP)  # it is in flight for as long as we like
    requests = [request_of([i, 4], 200, seed=i) for i in range(4)]
    streams = []
    for i, request in enumerate(requests):
        request.request_id = f"early-{i}"
        streams.append(server.stub.Generate(request, timeout=0.5 if way == "deadline" else 60.0))
    for stream in streams:
        assert next(stream).HasField("prompt_info")
    for i, stream in enumerate(streams):
        if way == "cancel":
            stream.cancel()
        elif way == "abort":
            server.stub.Abort(pb.AbortRequest(request_id=f"early-{i}"), timeout=10.0)
            assert list(stream)[-1].finish_info.reason == pb.FINISH_REASON_ABORT
        else:
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    os.kill(server.workers[0].pid, signal.SIGCONT)
    server.until(server.caches_are_empty)
    assert server.loads().num_running_reqs == server.loads().num_waiting_reqs == 0
    assert tokens_of(server.stub.Generate(request_of([1], 4, 5))) == generate(5, [1], 4)


def test_the_command_line_client_streams_and_scales(server: Process) -> None:
    arguments = ["generate", "the fox", "--server", server.address, "--max-tokens", "6"]
    result = CliRunner().invoke(app, [*arguments, "--seed", "3", "--ignore-eos"])
    assert result.exit_code == 0
    tokenizer = byte_level()
    expected = tokenizer.decode(generate(3, tokenizer.encode("the fox"), 6))
    assert result.output == f"{expected}\n"
    for wanted, previous in ((2, 0), (1, 2), (0, 1)):
        arguments = ["scale", "--server", server.control, "--cpu-attn-workers", str(wanted)]
        result = CliRunner().invoke(app, arguments)
        assert f"{previous} -> {wanted}" in result.output
        server.until(lambda wanted=wanted: server.cpu_workers() == wanted)


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


def test_the_same_request_id_twice_is_refused(server: Process) -> None:
    os.kill(server.workers[0].pid, signal.SIGSTOP)
    request = request_of([1], 8, 0)
    request.request_id = "twice"
    first = server.stub.Generate(request, timeout=60.0)
    next(first)
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request, timeout=10.0))
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    os.kill(server.workers[0].pid, signal.SIGCONT)
    assert tokens_of(first) == generate(0, [1], 8)


def test_sigterm_lets_streams_finish_and_leaves_nothing(server: Process) -> None:
    instance = server.instance()
    assert segments_of(instance)
    os.kill(server.workers[0].pid, signal.SIGSTOP)
    stream = server.stub.Generate(request_of([1, 2], 150, 3), timeout=60.0)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.health() == NOT_SERVING)
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request_of([1], 4, 0), timeout=10.0))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    os.kill(server.workers[0].pid, signal.SIGCONT)
    assert tokens_of(stream) == generate(3, [1, 2], 150)
    assert server.process.wait(20.0) == 0
    assert segments_of(instance) == []
    assert not server.address_file.exists()
    assert server.workers[0].wait(20.0) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_http_drains_as_grpc_does(tiny_model: Path, tmp_path: Path, signals: int) -> None:
    process = Process(tiny_model, tmp_path, "--http-port", "0")
    try:
        process.worker()
        process.until(process.address_file.exists)
        url = f"http://{process.address_file.read_text().split()[2]}"
        assert httpx.get(f"{url}/health", timeout=60.0).status_code == 200
        os.kill(process.workers[0].pid, signal.SIGSTOP)
        body = {"prompt": [1, 2], "max_tokens": 50, "seed": 3, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0) as stream:
            process.until(lambda: process.loads().num_running_reqs == 1)
            process.process.send_signal(signal.SIGTERM)
            process.until(lambda: httpx.get(f"{url}/health", timeout=60.0).status_code == 503)
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "service_unavailable"
            if signals == 2:
                process.process.send_signal(signal.SIGTERM)
                assert process.process.wait(20.0) == 0
                return
            os.kill(process.workers[0].pid, signal.SIGCONT)
            text = "".join(
                json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                for line in stream.iter_lines()
                if line.startswith("data: {")
            )
        assert text == byte_level().decode(generate(3, [1, 2], 50))
        assert process.process.wait(20.0) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=60.0)
    finally:
        process.close()


def test_a_http_port_in_use_is_named(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "neo_server", "serve", str(tiny_model), "--port", "0"]
        command += ["--control-port", "0", "--http-port", port, "--no-spawn-gpu-worker"]
        command += ["--kv-offloading-size", "0.002", "--device", "cpu", "--cpu-attn-workers", "0"]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr.splitlines()[-1]


def test_a_second_signal_ends_the_drain_at_once(server: Process) -> None:
    instance = server.instance()
    os.kill(server.workers[0].pid, signal.SIGSTOP)
    stream = server.stub.Generate(request_of([1, 2], 150, 3), timeout=60.0)
    next(stream)
    server.process.send_signal(signal.SIGINT)
    server.until(lambda: server.health() == NOT_SERVING)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20.0) == 0
    assert segments_of(instance) == []


def test_segments_of_a_killed_server_are_reclaimed_by_the_next(
    server: Process, tiny_model: Path, tmp_path: Path
) -> None:
    instance = server.instance()
    server.process.kill()
    server.process.wait()
    assert server.workers[0].wait(20.0) == 0
    folder = tmp_path / "next"
    folder.mkdir()
    following = Process(tiny_model, folder)
    try:
        assert segments_of(instance) == []
    finally:
        following.process.terminate()
        assert following.process.wait(20.0) == 0
        following.close()


MORE_THAN_SHM_GIB = shutil.disk_usage("/dev/shm").total // 2**30 + 1


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--scheduling-policy", "newest-first"], "newest-first"),
        (["--max-model-len", "9999"], "9999"),
        (["--kv-offloading-size", "400"], "needs"),
        (["--kv-offloading-size", "1e30"], "n_pages"),
        (["--cpu-attn-workers", "1000"], "--cpu-attn-workers"),
    ],
)
def test_a_start_that_cannot_work_says_why(tiny_model: Path, flags: list[str], word: str) -> None:
    command = [sys.executable, "-m", "neo_server", "serve", str(tiny_model), "--port", "0", *flags]
    command += ["--control-port", "0"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 1
    assert word in done.stderr.splitlines()[-1]
