from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_offload_table as script
from tests.helpers.server import REPO

# In place of `neo bench throughput`: a line for each work, until one that hangs.
FAKE = """
import json, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
works = [value for name, value in zip(sys.argv[2::2], sys.argv[3::2]) if name == "--sweep"]
tpot = {"p50_tpot_s": 0.01, "p99_tpot_s": 0.02, "num_requests": 3}
none = {"p50_tpot_s": None, "p99_tpot_s": None, "num_requests": 0}
for i, work in enumerate(works):
    if flags["--scheduling-policy"] == "neo" and work.startswith("1000/300"):
        print("hangs", file=sys.stderr, flush=True)
        time.sleep(600)
    rate = {"gpu-only": 2.0, "neo": 3.0}[flags["--scheduling-policy"]] + i
    print("not a line of figures")
    print(json.dumps({
        "work": work, "policy": flags["--scheduling-policy"], "requests_per_s": rate,
        "output_tokens_per_s": 9.0, "mean_tpot_s": None, "gpu_busy_share": 1.0,
        "cpu_busy_share": 0.5, "iterations": {"gpu_only": 4, "piggyback": 0},
        "latencies": {"gpu_requests": tpot, "cpu_requests": none, "gpu_and_cpu_requests": none},
    }), flush=True)
"""


def options_of(*words: str) -> Any:
    return script.arguments(list(words))


def flags_of(words: list[str], name: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == name]


def test_one_engine_runs_all_works_that_share_a_model_and_a_cache(tmp_path: Path) -> None:
    for work in script.works().values():
        if work.trace:
            (tmp_path / work.trace).touch()
    asked = ("8b-1000/50", "osc", "ac", "8b-1000/400")
    options = options_of(*asked, "--data-dir", str(tmp_path), "--kinds", "int8", "auto")
    runs = script.runs(options)
    assert [(run.works, run.engine.title) for run in runs] == [
        (works, title)
        for works in ([0, 2, 3], [1])
        for title in ("gpu-only", "neo, int8", "neo, auto")
    ]
    ac, osc = (str(tmp_path / script.works()[name].trace) for name in ("ac", "osc"))
    for run in runs[:3]:
        assert flags_of(run.words, "--sweep") == ["1000/50:400", f"{ac}:300", "1000/400:300"]
        assert flags_of(run.words, "--max-model-len") == ["8192"]
        assert flags_of(run.words, "--num-gpu-blocks-override") == ["1650"]
    for run in runs[3:]:
        assert flags_of(run.words, "--sweep") == [f"{osc}:300"]
        assert flags_of(run.words, "--max-model-len") == ["832"]
        assert "Llama-2-7B" in run.words
    policies = [flags_of(run.words, "--scheduling-policy")[0] for run in runs]
    assert policies == ["gpu-only", "neo", "neo"] * 2
    assert [flags_of(run.words, "--cpu-kv-cache-dtype")[0] for run in runs[1:3]] == ["int8", "auto"]


def test_a_flag_of_many_values_gives_an_engine_each_and_gpu_only_none() -> None:
    each = ("--each-of", "--tpot-slo-ms 50", "--tpot-slo-ms 100")
    options = options_of("8b-1000/50", "--kinds", "int8", *each, "--num-prompts", "7", "--", "--x")
    runs = script.runs(options)
    assert [run.engine.title for run in runs] == [
        "gpu-only",
        "neo, int8 --tpot-slo-ms 50",
        "neo, int8 --tpot-slo-ms 100",
    ]
    assert [flags_of(run.words, "--tpot-slo-ms") for run in runs] == [[], ["50"], ["100"]]
    assert all("--x" in run.words for run in runs)
    assert all(flags_of(run.words, "--sweep") == ["1000/50:7"] for run in runs)


def test_a_trace_without_its_directory_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for more in ((), ("--data-dir", str(tmp_path))):
        with pytest.raises(SystemExit, match=r"--data-dir is .*; it must be"):
            script.runs(options_of("8b-1000/50", "osc", *more))


def test_the_table_has_what_came_before_the_time_was_up_in_the_order_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(script, "PROGRAM", (sys.executable, str(fake)))
    works = ("8b-1000/200", "8b-1000/300", "8b-1000/50")
    words = ("script", *works, "--kinds", "int8", "--timeout", "10")
    monkeypatch.setattr(sys, "argv", list(words))
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1  # 300 hung, 50 was not reached
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(line["work"], line["policy"], line["relative"]) for line in lines] == [
        *((work, "gpu-only", 1.0) for work in works),
        ("8b-1000/200", "neo", 1.5),
    ]
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| 8b")]
    assert [row[:4] for row in table] == [
        ["| 8b-1000/200", "gpu-only", "2.00", "1.00"],
        ["| 8b-1000/200", "neo, int8", "3.00", "1.50"],
        ["| 8b-1000/300", "gpu-only", "3.00", "1.00"],
        ["| 8b-1000/50", "gpu-only", "4.00", "1.00"],
    ]
    assert table[0][6:9] == ["10.0 / 20.0 (3)", "", ""]
    widths = {line.count("|") for line in out.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert err.startswith("status -9: ")
    assert "hangs" in err


def test_a_signal_ends_the_process_that_runs_and_prints_the_table(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    code = (
        "import sys; from scripts import bench_offload_table as script\n"
        f"script.PROGRAM = (sys.executable, {str(fake)!r})\nscript.main()\n"
    )
    words = [sys.executable, "-c", code, "8b-1000/200", "8b-1000/300", "--kinds", "int8"]
    with subprocess.Popen(
        [*words, "--verbose"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        came = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [line["policy"] for line in came] == ["gpu-only", "gpu-only", "neo"]
        os.kill(process.pid, signal.SIGTERM)
        out = process.stdout.read()
        process.stderr.read()  # ends when the fake has ended, which inherited it
        assert process.wait(60.0) == 128 + signal.SIGTERM
    assert out.count("\n| 8b-1000/200 | ") == 2
