from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from neo_server.bench.commands import app as bench_app
from neo_server.cli import app
from neo_server.flags import takes
from neo_server.options import PANELS, Options

RUNNER = CliRunner()


@pytest.mark.parametrize("flag", ["--dtype", "--device", "--load-format"])
def test_an_unknown_choice_is_named(tiny_model: Path, flag: str) -> None:
    result = RUNNER.invoke(app, ["serve", str(tiny_model), flag, "nonsense"])
    assert result.exit_code == 2
    assert "nonsense" in result.output


def test_a_cpu_cache_size_is_a_number_or_auto(tiny_model: Path) -> None:
    flags = ["serve", str(tiny_model), "--shm-dir", "/no/such/tmpfs", "--kv-offloading-size"]
    for size in ("auto", "0.5"):
        result = RUNNER.invoke(app, [*flags, size])
        assert (result.exit_code, "--shm-dir" in result.output) == (1, True)  # so it got that far
    result = RUNNER.invoke(app, [*flags, "much"])
    assert (result.exit_code, "much" in result.output) == (2, True)


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_bench_takes_the_flags_of_the_engine_and_none_for_clients(command: str) -> None:
    (found,) = (c for c in bench_app.registered_commands if command == c.callback.__name__)
    flags = inspect.signature(found.callback).parameters
    engine = {field.name for field in fields(Options)} - {
        *("host", "port", "http_host", "http_port", "address_file", "served_model_name"),
        *("api_key", "max_num_queued_reqs", "max_num_queued_tokens", "shutdown_timeout"),
        *("uds", "ssl_certfile", "ssl_keyfile", "log_format", "log_stats_interval"),
    }
    assert engine <= set(flags)
    assert not {"host", "port", "address_file"} & set(flags)
    assert {"input_len", "output_len", "temperature"} <= set(flags)
    assert flags["control_port"].default == 0  # beside a server


@dataclass(frozen=True)
class _More:
    size: int = 4


def test_a_command_gets_one_object_of_each_kind() -> None:
    got: list[object] = []

    @takes(Options, _More, without=("host",), defaults={"port": 7, "host": "::1"})
    def command(options: Options, more: _More) -> None:
        got.extend((options, more))

    command(model="m", size=5)
    assert got == [Options(model="m", port=7, host="::1"), _More(5)]
    names = inspect.signature(command).parameters
    assert "host" not in names
    assert names["port"].default == 7
    assert names["model"].default is inspect.Parameter.empty


def test_every_flag_of_serve_has_vllms_spelling() -> None:
    command = app.registered_commands[0]
    assert command.callback is not None
    names = command.callback.__annotations__
    for flag in (
        *("host", "port", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("enable_chunked_prefill", "block_size", "gpu_memory_utilization", "dtype", "device"),
        *("num_gpu_blocks_override", "kv_cache_memory_bytes", "kv_offloading_size", "load_format"),
        *("scheduling_policy", "served_model_name", "seed"),
    ):
        assert flag in names


@pytest.mark.parametrize("command", ["scale", "cpu-attn-worker", "gpu-worker"])
def test_commands_for_workers_find_the_control_port_that_serve_takes(command: str) -> None:
    (found,) = (c for c in app.registered_commands if command in (c.name, c.callback.__name__))
    server = inspect.signature(found.callback).parameters["server"]
    assert server.default == f"127.0.0.1:{Options(model='').control_port}"
    assert Options(model="").control_port == 50052


def commands() -> list[tuple[str, Any]]:
    group: Any = typer.main.get_command(app)
    found = []
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {name: command})
        found.extend(inner.items())
    return found


@pytest.mark.parametrize(("name", "command"), commands())
def test_every_command_and_flag_says_what_it_is(name: str, command: Any) -> None:
    assert command.help
    for param in command.params:
        assert param.help, f"{name} {param.name}"


def test_every_flag_of_the_engine_has_its_panel() -> None:
    placed = [name for names in PANELS.values() for name in names]
    assert sorted([*placed, "model"]) == sorted(field.name for field in fields(Options))
    text = RUNNER.invoke(app, ["serve", "--help"]).output
    for panel in PANELS:
        assert f"─ {panel} ─" in text
    assert "[default: 50051]" in text.replace("\n", "")


def test_a_shell_completes_commands_and_flags() -> None:
    for words, expected in (("neo be", "bench"), ("neo serve --max-model", "--max-model-len")):
        environment = {"_NEO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}
        environment["COMP_CWORD"] = str(len(words.split()) - 1)
        result = RUNNER.invoke(app, env=environment, prog_name="neo")
        assert expected in result.output.split()


def test_an_unreachable_server_is_an_error_and_no_traceback() -> None:
    result = RUNNER.invoke(app, ["generate", "hi", "--server", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.output
