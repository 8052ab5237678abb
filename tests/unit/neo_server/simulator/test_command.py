"""``neo simulate`` on a small load."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from neo_server.cli import app
from neo_server.roofline import SHAPES
from neo_server.table_cost import Curve, Surface
from tests.unit.neo_server.test_cost_model import table as profile_table

# A GPU-cache of three requests: CPU-requests pay, and more of them with half the bytes.
FLAGS = (
    *("simulate", "--hardware", "g4dn.4xlarge", "--model", "llama-2-7b", "--gpu-tokens", "900"),
    *("--input-len", "200", "--output-len", "50", "--num-requests", "40"),
)


def requests_per_s(policy: str, *flags: str) -> float:
    arguments = [*FLAGS, "--policy", policy, *flags]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.startswith(f"│ {policy}"))
    return float(row.split("│")[2])


def test_an_int8_cache_and_riders_change_what_it_reports() -> None:
    plain = requests_per_s("neo")
    assert requests_per_s("neo") == plain
    assert requests_per_s("neo", "--cpu-kv-cache-dtype", "int8") > plain
    riding = requests_per_s("piggyback")
    assert requests_per_s("piggyback", "--no-enable-piggyback") != riding


@pytest.mark.parametrize("flags", [("--cpu-kv-cache-dtype", "int4"), ("--hardware", "abacus")])
def test_what_is_not_known_is_refused(flags: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, [*FLAGS, *flags], env={"COLUMNS": "160"})
    assert result.exit_code != 0
    assert flags[1] in result.output


def profile_file(folder: Path, **changes: object) -> Path:
    """A profile of Llama-2-7B's layers in which every stage takes tens of microseconds."""
    curve = Curve(x=[1.0, 1000.0], seconds=[1e-5, 2e-5])
    stages = dict.fromkeys(("linear", "prefill_attn", "handoff", "transfer", "head"), curve)
    attention = Surface(rows=[1, 2], tokens_per_row=[9, 99], seconds=[[1e-5] * 2, [2e-5] * 2])
    fields = {**stages, "gpu_attn": attention, "cpu_attn": attention, **changes}
    table = profile_table(num_layers=SHAPES["llama-2-7b"].layers, **fields)
    path = folder / "profile.json"
    path.write_text(table.model_dump_json())
    return path


def test_a_measured_profile_takes_the_place_of_the_hardwares_times(tmp_path: Path) -> None:
    fast = profile_file(tmp_path)
    measured = requests_per_s("gpu-only", "--profile", str(fast))
    assert measured != requests_per_s("gpu-only")
    slow = profile_file(tmp_path, linear=Curve(x=[1.0, 1000.0], seconds=[1e-3, 2e-3]))
    assert requests_per_s("gpu-only", "--profile", str(slow)) < 0.1 * measured


@pytest.mark.parametrize(
    ("changes", "flags", "word"),
    [
        ({"num_layers": 3}, (), "3 layers"),
        ({}, ("--cpu-kv-cache-dtype", "int8"), "int8"),
        ({}, ("--cpu-bandwidth", "2"), "cpu_bandwidth"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    changes: dict[str, object], flags: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    path = profile_file(tmp_path)
    if changes:
        path.write_text(profile_table(**changes).model_dump_json())
    arguments = [*FLAGS, "--profile", str(path), *flags]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code != 0
    assert word in result.output
