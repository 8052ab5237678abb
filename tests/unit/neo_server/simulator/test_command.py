"""``neo simulate`` on a small load."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from neo_server.cli import app

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
