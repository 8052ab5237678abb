from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from neo_server.bench import throughput
from neo_server.bench.throughput import ThroughputFlags, run, works_of
from neo_server.bench.works import Work, swept
from neo_server.errors import ConfigurationError
from neo_server.options import Options

QUIET = Console(quiet=True)


def test_a_work_is_two_lengths_or_a_trace_and_how_many(tmp_path: Path) -> None:
    trace = tmp_path / "trace:9.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n3,4\n5,6\n")
    texts = ["1000/50:400", "20/7", str(trace), f"{trace}:1"]
    works = swept(texts, 30)
    assert works == [
        Work(1000, 50, 400, None, "1000/50:400"),
        Work(20, 7, 30, None, "20/7"),
        Work(1, 1, 30, trace, str(trace)),
        Work(1, 1, 1, trace, f"{trace}:1"),
    ]
    lengths = [work.lengths(2000, 0, 0.0) for work in works[1:]]
    assert lengths == [[(20, 7)] * 30, [(3, 4), (5, 6)], [(3, 4)]]
    assert len(Work(20, 7, None, None).lengths(2000, 0, 0.0)) == 100


@pytest.mark.parametrize(
    "text", ["0/5", "5/0", "5/5:0", "5/-5", "5", "5/5:", "5/5:many", "5/5/5", "", "no/such.csv:3"]
)
def test_what_is_no_work_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        swept(["20/7", text], None)
    assert str(error.value).startswith(f"--sweep is {text!r}; it must be INPUT/OUTPUT")


def test_a_work_that_cannot_fit_and_a_trace_that_is_none_are_refused_by_name(
    tmp_path: Path,
) -> None:
    (work,) = swept(["30/20:3"], None)
    with pytest.raises(ConfigurationError, match=r"--sweep 30/20:3: .* 50 tokens.* is 40"):
        work.lengths(40, 0, 0.0)
    for name, text in (("a.json", '{"prompt": 1}'), ("b.json", "x"), ("c.csv", "Tokens\n3\n")):
        trace = tmp_path / name
        trace.write_text(text)
        (work,) = swept([str(trace)], None)
        with pytest.raises(ConfigurationError, match="is no CSV with ContextTokens"):
            work.lengths(40, 0, 0.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"input_len": 7}, "--input-len is 7; with --sweep"),
        ({"output_len": 7}, "--output-len is 7; with --sweep"),
        ({"dataset_path": Path("trace.csv")}, "--dataset-path is trace.csv; with --sweep"),
        ({"sweep": ["8/4", "8/0"]}, "--sweep is '8/0'"),
        ({"sweep": ["8/4", "8/4000"]}, "--sweep 8/4000: "),
    ],
)
def test_nothing_starts_where_a_work_is_impossible(
    flags: dict[str, object],
    message: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(throughput, "run_policy", lambda *_: pytest.fail("workers were started"))
    options = Options(model=str(tiny_model), device="cpu", max_model_len=64)
    with pytest.raises(ConfigurationError) as error:
        run(options, ThroughputFlags(**{"sweep": ["8/4"], **flags}), QUIET)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_without_a_sweep_the_flags_are_the_work() -> None:
    flags = ThroughputFlags(input_len=7, output_len=3, num_prompts=2)
    assert works_of(flags) == [Work(7, 3, 2, None)]


def test_each_line_is_relative_to_the_first_policys_of_the_same_work(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"gpu-only": (2.0, 8.0), "mixed": (3.0, 4.0)}
    said: list[tuple[str, float]] = []

    def fake(options, flags, works, console, say):  # type: ignore[no-untyped-def]
        for i, work in enumerate(works):
            say(i, {"work": work.name, "requests_per_s": rates[options.scheduling_policy][i]})
            line = json.loads(capsys.readouterr().out)  # there before the next work runs
            said.append((line["work"], line["relative"]))

    monkeypatch.setattr(throughput, "run_policy", fake)
    flags = ThroughputFlags(sweep=["8/4", "9/4"], policies="gpu-only,mixed")
    run(Options(model=str(tiny_model), device="cpu", max_model_len=64), flags, QUIET)
    assert said == [("8/4", 1.0), ("9/4", 1.0), ("8/4", 1.5), ("9/4", 0.5)]
