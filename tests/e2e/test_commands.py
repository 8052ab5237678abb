"""Commands that use a server that runs, with the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import REPO, RunningServer, request_of, running_server

CONFIG = """
max-model-len: 64
num_gpu_blocks_override: 256
kv-offloading-size: 0.1
scheduling-policy: mixed
profile: false
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,12,3\nx,600,3\nx,30,5\n"


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """``mixed``: every second request's attention is the cpu workers'."""
    folder = tmp_path_factory.mktemp("commands")
    config = folder / "neo.yaml"
    config.write_text(CONFIG)
    flags = ("--config", str(config), "--max-model-len", "512", "--http-port", "0")
    with running_server(demo_model, folder, *flags) as server:
        assert server.info().max_model_len == 512  # the flag wins
        assert server.info().scheduling_policy == "mixed"
        yield server


def neo(*arguments: str, stdin: str | None = None, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "neo_server", *arguments],
        capture_output=True,
        input=stdin,
        text=True,
        cwd=REPO,
        env={**os.environ, "COLUMNS": "100"},
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def bench(server: RunningServer, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    where = ("--server", server.address, "--base-url", f"http://{server.http_address}")
    result = ("--save-result", "--result-dir", str(folder), "--result-filename", "out.json")
    text = neo("bench", "serve", *where, *result, *arguments)
    return json.loads((folder / "out.json").read_text()), text


def test_bench_serve_over_grpc(server: RunningServer, tmp_path: Path) -> None:
    work = ("--num-prompts", "6", "--input-len", "20", "--output-len", "8", "--ignore-eos")
    load = ("--request-rate", "50", "--max-concurrency", "3", "--save-detailed")
    line, text = bench(server, tmp_path, *work, *load)
    assert (line["completed"], line["failed"]) == (6, 0)
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (120, 48)
    assert line["max_concurrent_requests"] <= 3
    assert line["output_lens"] == [8] * 6
    assert 0 < line["mean_ttft_ms"] <= line["mean_e2el_ms"]
    assert line["num_gpu_decodes"] + line["num_cpu_decodes"] >= 6 * 7
    assert line["num_cpu_decodes"] > 0
    assert f"Mean TTFT (ms):                          {line['mean_ttft_ms']:.2f}" in text
    assert "Successful requests:                     6" in text


def test_bench_serve_over_http_with_a_trace(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    data = ("--dataset-name", "trace", "--dataset-path", str(trace), "--ignore-eos")
    line, text = bench(server, tmp_path, "--backend", "openai", *data)
    assert "INFO" not in text  # not a line for every request
    # One of the three does not fit in max_model_len.
    assert (line["completed"], line["total_input_tokens"]) == (2, 42)
    assert line["total_output_tokens"] == 8
    assert 0 < line["mean_ttft_ms"] <= line["mean_e2el_ms"]


def test_bench_serve_of_conversations(server: RunningServer, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Say hello.", "max_tokens": 4}\n{"prompt": "And now?"}\n')
    flags = ("--dataset-name", "jsonl", "--dataset-path", str(data), "--output-len", "6")
    for backend in ("openai-chat", "grpc"):
        line, _ = bench(server, tmp_path, "--backend", backend, *flags, "--ignore-eos")
        assert (line["completed"], line["total_output_tokens"]) == (2, 10)


def test_bench_serve_counts_what_was_refused(server: RunningServer, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": [5, 6], "max_tokens": 3}\n{"prompt": [99999999]}\n')
    where = ("--server", server.address, "--base-url", f"http://{server.http_address}")
    flags = ("--dataset-name", "jsonl", "--dataset-path", str(data))
    for backend in ("openai", "grpc"):
        text = neo("bench", "serve", "--backend", backend, *where, *flags, status=1)
        assert "Failed requests:                         1" in text
        assert "Successful requests:                     1" in text
        assert "vocab_size" in text


def test_generate_in_the_chat_template(server: RunningServer) -> None:
    flags = ("--server", server.address, "--temperature", "0", "--max-tokens", "8")
    plain = neo("generate", "Say hello.", *flags)
    assert neo("generate", "-", *flags, stdin="Say hello.") == plain
    chat = neo("generate", "Say hello.", "--chat", *flags)
    assert chat.strip() not in ("", plain.strip())
    assert "INVALID_ARGUMENT: top_p is 3" in neo("generate", "x", "--top-p", "3", *flags, status=1)


def test_chat_of_the_lines_of_a_pipe(server: RunningServer) -> None:
    flags = ("--server", server.address, "--temperature", "0", "--max-tokens", "8")
    turns = "My name is Ada.\nWhat is my name?\n/clear\nWhat is my name?\n"
    text = neo("chat", "--ignore-eos", *flags, stdin=turns)
    assert text.count("[8 tokens, ") == 3
    assert text.count("-request, length]") + text.count("steps), length]") == 3
    answers = [line for line in text.splitlines() if line and not line.startswith("[")]
    assert answers[1] != answers[2]  # the third turn knew of no name


def test_chat_on_a_terminal(server: RunningServer) -> None:
    """An interrupt ends the answer, end of file the conversation."""
    parent, child = os.openpty()
    command = ("chat", "--server", server.address, "--ignore-eos", "--temperature", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "neo_server", *command],
        **{"stdin": child, "stdout": child, "stderr": child, "cwd": REPO},
        env={**os.environ, "COLUMNS": "400"},  # the model's path is in the first line
        start_new_session=True,
    )
    os.close(child)
    shown = b""

    def wait_for(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(parent, 4096)
        shown = shown.partition(text)[2]

    try:
        wait_for(b"Ctrl-C ends an answer.")
        wait_for(b"> ")
        done = server.loads().num_output_tokens
        os.write(parent, b"Count to a thousand.\n")
        server.wait_until(f"loads.num_output_tokens > {done + 3}")
        process.send_signal(signal.SIGINT)
        wait_for(b"[interrupted]")
        server.wait_until("loads.num_running_reqs == 0")
        wait_for(b"> ")
        os.write(parent, b"/what\n")
        wait_for(b"/clear forgets")
        wait_for(b"> ")
        os.write(parent, b"\x04")
        assert process.wait(30.0) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_top_shows_what_runs(server: RunningServer) -> None:
    flags = ("top", "--once", "--interval", "0.3", "--server", server.address)
    assert "0 running (0 CPU-requests), 0 waiting" in neo(*flags)
    prompts = [request_of([5, 6, 7], 400, f"top-{i}") for i in range(2)]
    streams = [server.stub.Generate(prompt) for prompt in prompts]
    try:
        server.wait_until("loads.num_running_reqs == 2 and loads.num_cpu_decodes > 0")
        text = neo(*flags)
    finally:
        for stream in streams:
            stream.cancel()
    assert "2 running (1 CPU-requests), 0 waiting" in text
    assert "mixed on " in text
    for pid in server.cpu_worker_pids():
        assert f" {pid} " in text
    server.assert_caches_end_empty()
    assert "UNAVAILABLE" in neo("top", "--once", "--server", "127.0.0.1:1", status=1)
