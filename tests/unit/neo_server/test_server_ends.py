"""How the server as a process ends, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import grpc
import httpx
import pytest

from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import (
    NOT_SERVING,
    Process,
    request_of,
    segments_of,
    tokens_of,
)
from tests.unit.neo_server.test_tokenizer import byte_level


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
