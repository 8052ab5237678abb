from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from neo_server.bench.serve import ServeFlags, run
from neo_server.bench.serve_figures import details, figures, print_figures
from neo_server.bench.serve_jobs import Job, jsonl_jobs, random_jobs, send_times
from neo_server.bench.serve_record import Record
from neo_server.client_flags import ServerFlags
from neo_server.errors import ConfigurationError, NeoError, UnavailableError

RECORDS = [
    Record(10, 4, 100.0, [101.0, 102.0, 105.0], None, 2, 1),  # one message had two tokens
    Record(20, 1, 100.5, [104.5]),
    Record(error="refused"),
]


def test_figures_are_vllms() -> None:
    line = figures(RECORDS, 8.0, [50.0, 99.0])
    assert (line["completed"], line["failed"]) == (2, 1)
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (30, 5)
    assert line["request_throughput"] == 0.25
    assert line["output_throughput"] == 0.625
    assert line["total_token_throughput"] == 35 / 8
    assert line["mean_ttft_ms"] == 2500.0
    assert line["median_ttft_ms"] == line["p50_ttft_ms"] == 2500.0
    assert line["p99_ttft_ms"] == pytest.approx(1000.0 + 0.99 * 3000.0)
    assert line["mean_tpot_ms"] == pytest.approx(4000.0 / 3)  # of the one with a second token
    assert (line["mean_itl_ms"], line["std_itl_ms"]) == (2000.0, 1000.0)
    assert line["mean_e2el_ms"] == 4500.0
    # The paper's: 5 s for four tokens, 4 s for one.
    assert line["mean_per_token_latency_ms"] == (1250.0 + 4000.0) / 2
    assert line["max_concurrent_requests"] == 2
    assert (line["num_gpu_decodes"], line["num_cpu_decodes"]) == (2, 1)
    assert json.loads(json.dumps(line)) == line


def test_where_nothing_was_answered_there_are_no_latencies() -> None:
    line = figures([Record(error="x")], 1.0, [99.0])
    assert (line["completed"], line["mean_per_token_latency_ms"]) == (0, None)
    assert not any("ttft" in name for name in line)
    out = StringIO()
    config = {"request_rate": "inf", "max_concurrency": None}
    print_figures(Console(file=out), line | config, [99.0])
    assert "Failed requests:                         1" in out.getvalue()
    assert "TTFT" not in out.getvalue()


def test_the_printed_block_names_every_figure() -> None:
    out = StringIO()
    config = {"request_rate": 2.5, "max_concurrency": 7}
    line = figures(RECORDS, 8.0, [99.0]) | config
    print_figures(Console(file=out, width=60), line, [99.0])
    text = out.getvalue()
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        for figure in ("Mean", "Median", "P99"):
            assert f"{figure} {name} (ms):" in text
    assert "Mean per-token latency (ms):             2625.00" in text
    assert "Request rate configured (RPS):           2.50" in text
    assert "Maximum request concurrency:             7" in text
    assert "CPU share (%):                           33.33" in text


def test_details_are_of_every_request_in_order() -> None:
    found = details(RECORDS)
    assert found["ttfts"] == [1.0, 4.0, None]
    assert found["itls"] == [[1.0, 3.0], [], []]
    assert found["errors"] == ["", "", "refused"]
    assert found["output_lens"] == [4, 1, 0]


def test_arrivals_have_the_rate_and_the_seed() -> None:
    times = send_times(4000, 5.0, 1.0, 0)
    assert times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)  # Poisson
    steady = np.diff(send_times(4000, 5.0, 100.0, 0))
    assert steady.mean() == pytest.approx(0.2, rel=0.1)
    assert steady.std() == pytest.approx(0.02, rel=0.1)
    assert send_times(9, 5.0, 1.0, 3) == send_times(9, 5.0, 1.0, 3) != send_times(9, 5.0, 1.0, 4)
    assert send_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_lines_of_json_become_requests(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ('{"prompt": "one", "max_tokens": 3}', "", '{"prompt": [4, 5], "output_len": 2}')
    path.write_text("\n".join([*lines, '{"prompt": "x"}\n']))
    jobs = [Job("one", 3), Job([4, 5], 2), Job("x", 16)]
    assert jsonl_jobs(path, 16, None, 0) == jobs
    assert jsonl_jobs(path, 16, 2, 0) == jobs[:2]
    more = jsonl_jobs(path, 16, 30, 1)
    assert (more[:3], len(more)) == (jobs, 30)
    assert more == jsonl_jobs(path, 16, 30, 1) != jsonl_jobs(path, 16, 30, 2)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"text": "a"}',
        '{"prompt": ""}',
        '{"prompt": "a", "max_tokens": 0}',
        "[]",
        '{"prompt": 3}',
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=r"prompts.jsonl, line 2"):
        jsonl_jobs(path, 16, None, 0)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="holds no request"):
        jsonl_jobs(path, 16, None, 0)


def test_random_prompts_are_of_the_seed() -> None:
    def jobs(seed: int) -> list[Job]:
        return random_jobs(None, 8, 3, 5, 0.0, vocab_size=50, max_model_len=20, seed=seed)

    assert jobs(0) == jobs(0) != jobs(1)
    assert {(len(job.prompt), job.max_tokens) for job in jobs(0)} == {(8, 3)}
    with pytest.raises(ConfigurationError, match="max_model_len is 10"):
        random_jobs(None, 8, 3, 5, 0.0, vocab_size=50, max_model_len=10, seed=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"burstiness": -1.0}, "--burstiness is -1"),
        ({"dataset_name": "jsonl"}, "jsonl needs --dataset-path"),
        ({"dataset_path": Path("x")}, "random takes no --dataset-path"),
        ({"backend": "openai-chat"}, "--dataset-name jsonl; it is random"),
        ({"metric_percentiles": "99,x"}, "--metric-percentiles is '99,x'"),
        ({"metric_percentiles": "101"}, "from 0 to 100"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(ServeFlags(**flags), ServerFlags(), Console(), Console())


@pytest.mark.parametrize("backend", ["grpc", "openai"])
def test_a_server_that_is_not_there_is_an_error_of_ours(backend: str) -> None:
    flags = ServeFlags(backend=backend, base_url="http://127.0.0.1:1")
    with pytest.raises(UnavailableError) as caught:
        run(flags, ServerFlags("127.0.0.1:1"), Console(), Console())
    assert isinstance(caught.value, NeoError)
