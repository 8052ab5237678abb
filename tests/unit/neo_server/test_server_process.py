"""The whole server as a process, over gRPC and the real rings; only the gpu worker is fake."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from neo_server.cli import app
from protos import inference_pb2 as pb
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import (
    NOT_SERVING,
    REPO,
    SERVING,
    Process,
    request_of,
    tokens_of,
)
from tests.unit.neo_server.test_tokenizer import byte_level


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


def test_a_http_port_in_use_is_named(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "neo_server", "serve", str(tiny_model), "--port", "0"]
        command += ["--control-port", "0", "--http-port", port, "--no-spawn-gpu-worker"]
        command += ["--kv-offloading-size", "0.002", "--device", "cpu", "--cpu-attn-workers", "0"]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr.splitlines()[-1]


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
