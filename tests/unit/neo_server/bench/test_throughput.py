from __future__ import annotations

import json
from pathlib import Path

import pytest

from neo_server.bench.counters import CpuWork, work_between
from neo_server.bench.drive import Recorder
from neo_server.bench.throughput_figures import figures, latencies
from neo_server.bench.workload import Prompt, lengths_of, prompts_of
from neo_server.errors import ConfigurationError, NeoError
from neo_server.metrics import Metrics
from neo_server.request import Finish, FinishReason
from neo_server.shared_memory import WorkerEntry


def record_of(*times: float, gpu: int = 0, cpu: int = 0) -> Recorder:
    record = Recorder(lambda: None)
    record.times.extend(times)
    record.num_gpu_decodes, record.num_cpu_decodes = gpu, cpu
    return record


def entry(row: int, pid: int, busy_s: float, kv_bytes: int) -> WorkerEntry:
    return WorkerEntry(
        row=row,
        pid=pid,
        num_threads=3,
        tasks=1,
        busy_s=busy_s,
        kv_bytes_read=kv_bytes,
        heartbeat_ns=1,
    )


def test_figures_count_from_the_submission_to_the_last_token() -> None:
    prompts = [Prompt([1] * 10, 3), Prompt([1] * 6, 1)]
    records = [record_of(101.0, 102.0, 104.0), record_of(103.0)]
    metrics = Metrics(device_s=2.0, num_preemptions=5)
    line = figures(100.0, prompts, records, metrics, CpuWork(threads=4, busy_s=8.0, kv_bytes=40))
    assert line["elapsed_s"] == 4.0
    assert line["requests_per_s"] == 0.5
    assert (line["num_output_tokens"], line["output_tokens_per_s"]) == (4, 1.0)
    assert line["total_tokens_per_s"] == 5.0
    assert line["mean_ttft_s"] == 2.0
    assert line["mean_tpot_s"] == 1.5  # of the one that has a second token
    assert line["gpu_busy_share"] == 0.5
    assert line["cpu_busy_share"] == 0.5
    assert line["cpu_kv_bytes_per_s"] == 10.0
    assert line["num_preemptions"] == 5
    assert json.loads(json.dumps(line)) == line


def test_without_cpu_workers_and_second_tokens_there_is_nothing_to_divide_by() -> None:
    line = figures(0.0, [Prompt([1], 1)], [record_of(1.0)], Metrics(), CpuWork(0, 0.0, 0))
    assert (line["cpu_busy_share"], line["mean_tpot_s"]) == (0.0, None)


def test_latencies_are_of_all_requests_and_by_where_they_decoded() -> None:
    records = [
        record_of(11.0, 11.5, 12.0, gpu=2),
        record_of(13.0, 14.5, 16.0, gpu=2),
        record_of(12.0, 14.0, 16.0, cpu=2),
        record_of(12.0, 13.0, 20.0, gpu=1, cpu=1),
        record_of(15.0),  # no decode step: a GPU-request
    ]
    line = latencies(10.0, records)
    assert {name: one["num_requests"] for name, one in line.items()} == {
        "all": 5,
        "gpu_requests": 3,
        "cpu_requests": 1,
        "gpu_and_cpu_requests": 1,
    }
    assert line["all"]["p50_ttft_s"] == 2.0
    assert line["all"]["p50_tpot_s"] == 1.75  # of 0.5, 1.5, 2 and 4
    gpu = line["gpu_requests"]
    assert (gpu["p50_ttft_s"], gpu["p50_tpot_s"]) == (3.0, 1.0)
    assert gpu["p99_ttft_s"] == pytest.approx(4.96)  # between 3 and 5, linearly
    assert gpu["p99_tpot_s"] == pytest.approx(1.49)
    for name, tpot in (("cpu_requests", 2.0), ("gpu_and_cpu_requests", 4.0)):
        assert (line[name]["p50_tpot_s"], line[name]["p99_tpot_s"]) == (tpot, tpot)


def test_where_there_is_no_request_or_no_second_token_a_percentile_is_null() -> None:
    line = latencies(0.0, [record_of(1.0)])
    assert line["gpu_requests"]["p99_ttft_s"] == 1.0
    assert line["gpu_requests"]["p99_tpot_s"] is None
    assert set(line["cpu_requests"].values()) == {0, None}
    assert json.loads(json.dumps(line)) == line


def test_cpu_work_is_the_difference_and_a_replaced_worker_starts_at_zero() -> None:
    before = [entry(0, 10, 1.0, 100), entry(1, 11, 5.0, 500)]
    after = [entry(0, 10, 1.5, 160), entry(1, 12, 0.25, 20)]
    assert work_between(before, after) == CpuWork(threads=6, busy_s=0.75, kv_bytes=80)


def test_a_recorder_notes_every_token_and_ends_once() -> None:
    ends: list[int] = []
    record = Recorder(lambda: ends.append(len(record.times)))
    record.push("a", (1,))
    record.push("", (2, 3))
    assert not ends
    record.push("", (4,), Finish(FinishReason.LENGTH))
    assert ends == [4]
    assert record.times == sorted(record.times)
    failed = Recorder(lambda: ends.append(-1))
    error = NeoError("lost")
    failed.fail(error)
    assert (ends, failed.error) == ([4, -1], error)


def test_synthetic_lengths_are_exact_unless_a_range_is_asked_for() -> None:
    assert lengths_of(None, 20, 5, 3, 25, 0) == [(20, 5)] * 3
    spread = lengths_of(None, 100, 50, 64, 1000, 0, 0.2)
    assert {80 <= prompt <= 120 and 40 <= output <= 60 for prompt, output in spread} == {True}
    assert len(set(spread)) > 1
    assert spread == lengths_of(None, 100, 50, 64, 1000, 0, 0.2)
    assert spread != lengths_of(None, 100, 50, 64, 1000, 1, 0.2)


def test_lengths_that_cannot_fit_are_refused_by_name_and_limit() -> None:
    with pytest.raises(ConfigurationError, match=r"26 tokens.*max_model_len is 25"):
        lengths_of(None, 21, 5, 3, 25, 0)
    with pytest.raises(ConfigurationError, match="--output-len is 0"):
        lengths_of(None, 21, 0, 3, 25, 0)


def test_a_trace_gives_its_first_requests_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rows = [{"prompt": n, "max_tokens": 2} for n in (5, 50, 6, 7)]
    path.write_text(json.dumps(rows))
    assert lengths_of(path, 1, 1, 2, 20, 0) == [(5, 2), (6, 2)]
    assert lengths_of(path, 1, 1, None, 20, 0) == [(5, 2), (6, 2), (7, 2)]
    with pytest.raises(ConfigurationError, match="no request of at most max_model_len, 4"):
        lengths_of(path, 1, 1, None, 4, 0)


def test_prompts_are_of_the_vocabulary_and_of_the_seed() -> None:
    prompts = prompts_of([(30, 2), (4, 9)], 7, 3)
    assert [(len(p.ids), p.num_output) for p in prompts] == [(30, 2), (4, 9)]
    assert set(prompts[0].ids) <= set(range(7))
    assert prompts == prompts_of([(30, 2), (4, 9)], 7, 3)
    assert prompts != prompts_of([(30, 2), (4, 9)], 7, 4)
