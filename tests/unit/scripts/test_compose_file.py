"""docker-compose.yml as text: what can be said of it without an engine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from cpu_attn_worker.__main__ import parse_args
from neo_server.cli import app

REPO = Path(__file__).resolve().parents[3]
TEXTS = {
    name: (REPO / name).read_text(encoding="utf-8")
    for name in ("docker-compose.yml", "scripts/docker/gpu.yml")
}
OURS = ("shared-memory", "fetch-model", "server", "gpu-worker", "cpu-attn-worker")


def interpolated(text: str, **variables: str) -> Any:
    """As Compose does: ``${NAME:-default}``, and ``$$`` for a dollar."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1]) or match[2] or ""

    text = re.sub(r"(?<!\$)\$\{(\w+)(?::-([^}]*))?\}", value, text)
    return yaml.safe_load(text.replace("$$", "$"))


SERVICES = interpolated(TEXTS["docker-compose.yml"])["services"]


def server_arguments(entrypoint: list[str], **variables: str) -> list[str]:
    services = interpolated(TEXTS["docker-compose.yml"], **variables)["services"]
    assert entrypoint[:5] == ["python", "-P", "-m", "neo_server", "serve"]
    return [*entrypoint[5:], *shlex.split(services["server"]["command"])]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_servers_command_line_is_one_that_it_takes(device: str) -> None:
    entrypoint = SERVICES["server"]["entrypoint"]
    if device == "cuda":
        entrypoint = interpolated(TEXTS["scripts/docker/gpu.yml"])["services"]["server"][
            "entrypoint"
        ]
    arguments = server_arguments(entrypoint, NEO_ARGS="--max-model-len 64 --api-key 'a b'")
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    parsed = serve.make_context("serve", arguments).params
    assert (parsed["device"], parsed["max_model_len"], parsed["api_key"]) == (device, 64, "a b")
    assert not parsed["spawn_gpu_worker"]
    assert not parsed["spawn_cpu_attn_workers"]
    assert parsed["cpu_attn_workers"] == SERVICES["cpu-attn-worker"]["deploy"]["replicas"]
    ports = [str(entry).rsplit(":", 1)[1] for entry in SERVICES["server"]["ports"]]
    assert ports == [str(parsed["port"]), str(parsed["http_port"])]  # not the control port


def test_workers_are_started_where_the_server_listens_for_them() -> None:
    arguments = server_arguments(SERVICES["server"]["entrypoint"])
    control = arguments[arguments.index("--control-port") + 1]
    for service, module in (("gpu-worker", "gpu_worker"), ("cpu-attn-worker", "cpu_attn_worker")):
        command = SERVICES[service]["command"]
        assert command == [module, "--server", f"server:{control}"]
    assert parse_args(SERVICES["cpu-attn-worker"]["command"][1:]).server == f"server:{control}"


def test_services_share_the_memory_of_one_that_never_restarts_with_them() -> None:
    assert SERVICES["shared-memory"]["ipc"] == "shareable"
    for service in ("server", "gpu-worker", "cpu-attn-worker"):
        assert SERVICES[service]["ipc"] == "service:shared-memory"
    assert not SERVICES["shared-memory"].get("depends_on")


@pytest.mark.parametrize("service", OURS)
def test_no_service_may_do_more_than_it_needs(service: str) -> None:
    settings = SERVICES[service]
    assert settings["cap_drop"] == ["ALL"]
    assert settings["read_only"]
    assert "no-new-privileges:true" in settings["security_opt"]
    assert not settings.keys() & {"privileged", "network_mode", "pid", "user", "cap_add"}


def test_images_of_others_are_pinned() -> None:
    for name, settings in SERVICES.items():
        if name not in OURS:
            assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", settings["image"]), name


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_variable_is_in_the_documentation(name: str) -> None:
    documented = (REPO / "docs/deployment.md").read_text(encoding="utf-8")
    variables = set(re.findall(r"(?<!\$)\$\{(\w+)", TEXTS[name]))
    assert variables
    assert {variable for variable in variables if f"`{variable}`" not in documented} == set()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_target_is_a_stage_of_the_dockerfile(name: str) -> None:
    dockerfile = (REPO / "scripts/docker/Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    services = interpolated(TEXTS[name])["services"].values()
    targets = {one["build"]["target"] for one in services if "build" in one}
    assert targets <= stages
    last = re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE)
    assert last[-1] == "neo"
