from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from neo_server.cli import app as neo
from neo_server.config_file import ConfigFlags
from neo_server.flags import takes
from neo_server.options import Options

RUNNER = CliRunner()


@dataclass(frozen=True)
class _Key:
    secret: Annotated[str | None, typer.Option(envvar="TEST_SECRET")] = None


def run(folder: Path, text: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """The options that a command gets, or what it printed when it refused."""
    path = folder / "neo.yaml"
    path.write_text(text)
    app = typer.Typer()
    got: list[Any] = []

    @app.command()
    @takes(Options, _Key, ConfigFlags)
    def command(options: Options, key: _Key, config: ConfigFlags) -> None:
        got.extend((options, key))

    result = RUNNER.invoke(app, ["--config", str(path), *arguments], env=env)
    if result.exit_code:
        assert result.exit_code == 2
        assert not got
        return " ".join(result.output.replace("│", " ").split())
    return got


FILE = """
model: some/model
max-model-len: 512
kv_offloading_size: auto
gpu-memory-utilization: 0.5
profile: false
enforce-eager: true
device: cpu
http_port: null
secret: from the file
"""


def test_a_file_gives_the_values_of_flags(tmp_path: Path) -> None:
    options, key = run(tmp_path, FILE)
    assert options == Options(
        model="some/model",
        max_model_len=512,
        gpu_memory_utilization=0.5,
        profile=False,
        enforce_eager=True,
        device="cpu",
    )
    assert key.secret == "from the file"


def test_flags_win_and_so_does_the_environment(tmp_path: Path) -> None:
    arguments = ("other/model", "--max-model-len", "64", "--profile", "--device", "auto")
    options, key = run(tmp_path, FILE, *arguments, env={"TEST_SECRET": "mine"})
    assert (options.model, options.max_model_len, options.profile) == ("other/model", 64, True)
    assert (options.device, options.enforce_eager) == ("auto", True)
    assert key.secret == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_modellen: 3", ["unknown flag 'max_modellen'", "max_model_len"]),
        ("config: x", ["unknown flag 'config'"]),
        ("max-model-len: 3\nmax_model_len: 4", ["there twice", "max_model_len"]),
        ("max-model-len: many", ["--max-model-len"]),
        ("device: tpu", ["tpu", "--device"]),
        ("host: [a, b]", ["host is ['a', 'b']", "one value"]),
        ("- host", ["must be a mapping"]),
        ("host: 'x", ["neo.yaml"]),
        ("max_skipped_iterations: 0", ["--max-skipped-iterations"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    shown = run(tmp_path, text, "some/model")
    unbroken = "".join(shown.translate({ord("│"): None}).split())  # a long path is wrapped
    for word in words:
        assert "".join(word.split()) in unbroken


def test_serve_reads_its_model_from_the_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "neo.yaml"
    path.write_text(f"model: {tiny_model}\nshm-dir: /no/such/tmpfs\n")
    result = RUNNER.invoke(neo, ["serve", "--config", str(path)])
    assert result.exit_code == 1
    assert "--shm-dir is /no/such/tmpfs" in result.output
    result = RUNNER.invoke(neo, ["serve"])
    assert result.exit_code == 2  # without a file there is no model
