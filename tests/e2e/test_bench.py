from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import REPO
from tests.helpers.tiny_llama import make_checkpoint

NO_TOKENIZER = ("--skip-tokenizer-init",)
ITERATIONS = ("gpu_only", "one_batch", "two_batches", "piggyback")


@pytest.fixture(scope="module")
def no_tokenizer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-model")
    make_checkpoint(folder, "llama3")
    return folder


def command(model: Path, kind: str, *arguments: str) -> list[str]:
    flags = ("--device", "cpu", "--kv-offloading-size", "0.01", "--no-profile")
    program = (sys.executable, "-m", "neo_server", "bench", kind)
    return [*program, str(model), *flags, *arguments]


def run(
    model: Path, kind: str, *arguments: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(model, kind, *arguments),
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def bench(model: Path, kind: str, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(model, kind, *arguments).stdout.splitlines()]


def test_throughput_of_two_policies_side_by_side(no_tokenizer_model: Path) -> None:
    work = ("--input-len", "40", "--output-len", "7", "--num-prompts", "9")
    cache = ("--num-gpu-blocks-override", "12", "--max-num-seqs", "8", *NO_TOKENIZER)
    lines = bench(no_tokenizer_model, "throughput", "--policies", "gpu-only,mixed", *work, *cache)
    assert [line["policy"] for line in lines] == ["gpu-only", "mixed"]
    for line in lines:
        assert (line["num_requests"], line["num_prompt_tokens"]) == (9, 360)
        assert line["num_output_tokens"] == 9 * 7
        assert line["output_tokens_per_s"] == pytest.approx(63 / line["elapsed_s"])
        assert tuple(line["iterations"]) == ITERATIONS
        assert line["num_gpu_decodes"] + line["num_cpu_decodes"] >= 9 * 6
        assert 0.0 < line["gpu_busy_share"] <= 1.01
    gpu_only, mixed = lines
    assert gpu_only["relative"] == 1.0
    assert mixed["relative"] == pytest.approx(mixed["requests_per_s"] / gpu_only["requests_per_s"])
    assert (gpu_only["num_cpu_decodes"], gpu_only["cpu_kv_bytes_per_s"]) == (0, 0.0)
    assert mixed["num_cpu_decodes"] > 0
    assert mixed["cpu_kv_bytes_per_s"] > 0.0
    assert mixed["iterations"]["one_batch"] + mixed["iterations"]["two_batches"] > 0


def test_works_on_one_engine_get_lines_of_their_own(
    no_tokenizer_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    works = ("--sweep", "40/7:9", "--sweep", "24/5", "--sweep", "40/7:9", "--num-prompts", "4")
    cache = ("--num-gpu-blocks-override", "12", "--max-num-seqs", "8", *NO_TOKENIZER)
    trace = ("--trace-timeline", str(out), "--trace-after", "1", "--trace-iterations", "2")
    policies = ("--policies", "gpu-only,mixed")
    arguments = (*policies, *works, *cache, *trace)
    done = run(no_tokenizer_model, "throughput", *arguments)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.stderr.count("gpu worker on") == 2  # engines
    assert [(line["policy"], line["work"]) for line in lines] == [
        (policy, work) for policy in ("gpu-only", "mixed") for work in ("40/7:9", "24/5", "40/7:9")
    ]
    for i, line in enumerate(lines):
        num, num_prompt, num_output = (4, 24, 5) if line["work"] == "24/5" else (9, 40, 7)
        assert (line["num_requests"], line["num_prompt_tokens"]) == (num, num * num_prompt)
        assert line["num_output_tokens"] == num * num_output
        # Every sequence's blocks hold the whole of it from the start, so none is preempted.
        steps = line["num_gpu_decodes"] + line["num_cpu_decodes"]
        assert (steps, line["num_preemptions"]) == (num * (num_output - 1), 0)
        assert num_output <= sum(line["iterations"].values()) <= num * num_output + num_prompt
        assert 0.0 < line["gpu_busy_share"] <= 1.01
        assert line["relative"] == line["requests_per_s"] / lines[i % 3]["requests_per_s"]
        everything, *by_place = line["latencies"].values()
        assert everything["num_requests"] == sum(one["num_requests"] for one in by_place) == num
        assert 0.0 < everything["p50_tpot_s"] <= everything["p99_tpot_s"] < line["elapsed_s"]
    for gpu_only, mixed in zip(lines[:3], lines[3:], strict=True):
        assert (gpu_only["num_cpu_decodes"], gpu_only["cpu_kv_bytes_per_s"]) == (0, 0.0)
        assert gpu_only["latencies"]["gpu_requests"]["num_requests"] == gpu_only["num_requests"]
        reads = mixed["cpu_kv_bytes_per_s"] > 0.0
        assert reads == (mixed["num_cpu_decodes"] > 0)
    assert lines[3]["num_cpu_decodes"] > 0 < lines[5]["num_cpu_decodes"]
    for policy in ("gpu-only", "mixed"):  # of the first work: later plans are not in it
        events = json.loads(out.with_stem(f"out-{policy}").read_text())["traceEvents"]
        plans = {event["args"]["plan_id"] for event in events if event["name"] == "iteration"}
        first = next(line for line in lines if line["policy"] == policy)
        assert len(plans) == 2 <= sum(first["iterations"].values())


def test_what_is_no_work_ends_the_command_before_any_worker_starts(
    no_tokenizer_model: Path,
) -> None:
    arguments = ("--sweep", "40/7", "--sweep", "40/none", *NO_TOKENIZER)
    done = run(no_tokenizer_model, "throughput", *arguments, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("neo: --sweep is '40/none'; it must be INPUT/OUTPUT")


def test_a_trace_is_run_as_it_is_and_random_weights_need_no_tokenizer(
    no_tokenizer_model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,12,3\nx,600,3\nx,30,5\n")
    flags = (
        "--dataset-path",
        str(trace),
        "--scheduling-policy",
        "gpu-only",
        "--load-format",
        "dummy",
    )
    (line,) = bench(no_tokenizer_model, "throughput", *flags)
    assert (line["num_requests"], line["num_prompt_tokens"], line["num_output_tokens"]) == (
        2,
        42,
        8,
    )
    assert "relative" not in line


def test_latency_of_one_batch_stands_beside_its_roofline(no_tokenizer_model: Path) -> None:
    work = ("--batch-size", "3", "--input-len", "20", "--output-len", "6", "--num-iters", "2")
    (line,) = bench(no_tokenizer_model, "latency", *work, *NO_TOKENIZER)
    # The last first token starts the decodes; here all prompts fit into one iteration.
    assert line["num_decode_iterations"] == 2 * 5
    assert line["decode_device_s"] > 0.0
    assert 0.0 < line["decode_s"] <= line["decode_p99_s"]
    assert line["decode_over_roofline"] == pytest.approx(
        line["decode_s"] / line["decode_roofline_s"]
    )
    assert 2 * 3 * 5 <= line["num_gpu_decodes"] < 3 * 3 * 5  # without the warm-up run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_and_leaves_no_segment(
    no_tokenizer_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    work = ("--input-len", "20", "--output-len", "400", "--num-prompts", "64", *NO_TOKENIZER)
    arguments = command(no_tokenizer_model, "throughput", *work, "--shm-dir", str(shm))
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=REPO) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "GPU blocks" in line:  # the gpu worker is ready
                break
        assert any(shm.iterdir())
        process.send_signal(number)
        process.stderr.read()  # ends when the last worker has ended, which inherited it
        assert process.wait(60.0) == 130
    assert not any(shm.iterdir())


def test_a_timeline_of_two_batches_holds_every_task_of_its_iterations(
    no_tokenizer_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    work = ("--input-len", "40", "--output-len", "9", "--num-prompts", "8", *NO_TOKENIZER)
    trace = ("--trace-timeline", str(out), "--trace-after", "3", "--trace-iterations", "3")
    bench(no_tokenizer_model, "throughput", "--scheduling-policy", "symmetric", *work, *trace)
    spans = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    iterations = [span for span in spans if span["name"] == "iteration"]
    assert len({span["args"]["plan_id"] for span in iterations}) == len(iterations) == 3
    assert any(span["args"]["channel"] == 1 for span in spans if span["name"] == "linear")
    names = ("layer", "channel", "slot", "kv_head", "split")
    for whole in iterations:
        begin, end = whole["ts"], whole["ts"] + whole["dur"]
        tasks = {
            tuple(span["args"][name] for name in names)
            for span in spans
            if span["name"] == "attend" and begin <= span["ts"] <= end
        }
        assert len(tasks) == whole["args"]["tasks"] > 0
    server = [span for span in spans if span["cat"] == "server"]
    assert {span["name"] for span in server} == {"plan", "update"}
