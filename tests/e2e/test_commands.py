"""Commands that use a server that runs, with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import REPO, RunningServer, running_server

NAME = "demo"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,12,3\nx,600,3\nx,30,5\n"


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """``mixed``: every second request's attention is the cpu workers'."""
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "256", "--no-profile")
    more = ("--kv-offloading-size", "0.1", "--http-port", "0", "--scheduling-policy", "mixed")
    folder = tmp_path_factory.mktemp("commands")
    with running_server(demo_model, folder, *flags, *more) as server:
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
    line, _ = bench(server, tmp_path, "--backend", "openai", *data)
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
