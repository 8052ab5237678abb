"""docker-compose.yml as a running project, and a client for its server."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from tests.helpers.server import REPO, Generation, RunningServer

START_TIMEOUT_S = 900.0  # of containers whose images are there
BUILD_TIMEOUT_S = 3600.0
COMMAND_TIMEOUT_S = 300.0
LABEL = "label=com.docker.compose.project="


def compose_command() -> list[str] | None:
    """``docker compose`` or ``docker-compose``; None where there is neither, or no engine."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and _succeeds([*command, "version"]):
            return command if _succeeds(["docker", "info"]) else None
    return None


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Project(RunningServer):
    """Services of one project. What the images are built from comes from NEO_* variables."""

    def __init__(self, command: list[str], model: Path, **settings: str) -> None:
        self.name = f"neotest{os.getpid()}"
        self._command = command
        port, http_port = _free_port(), _free_port()
        self.address, self.http_address = f"127.0.0.1:{port}", f"127.0.0.1:{http_port}"
        self._environment = os.environ | {
            "COMPOSE_PROJECT_NAME": self.name,
            "NEO_MODELS": str(model.parent),
            "NEO_MODEL": model.name,
            "NEO_PORT": str(port),
            "NEO_HTTP_PORT": str(http_port),
            **settings,
        }
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpc.InferenceStub(self.channel)

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs a command of Compose; fails with what it printed."""
        command = [*self._command, "-f", str(REPO / "docker-compose.yml"), *arguments]
        result = subprocess.run(
            command,
            env=self._environment,
            timeout=timeout_s,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if result.returncode != 0:
            raise AssertionError(
                f"{' '.join(command)}: status {result.returncode}\n{result.stdout}"
            )
        return result.stdout

    def up(self, workers: int) -> None:
        """Starts what does not run, with so many cpu-attention workers; touches nothing else."""
        scale = f"cpu-attn-worker={workers}"
        self.compose("up", "--detach", "--no-recreate", "--no-build", "--scale", scale)

    def log(self) -> str:
        """Of every service."""
        return self.compose("logs", "--no-color", "--tail", "60")

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What ``docker inspect`` says of a service's containers that are not gone."""
        wanted = [*("--filter", f"{LABEL}{self.name}")]
        wanted += ["--filter", f"label=com.docker.compose.service={service}"]
        ids = docker("ps", "--all", "--quiet", *wanted).split()
        found: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return sorted(found, key=lambda one: str(one["Name"]))

    def wait_until_serving(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits for health; fails with every log."""
        deadline = time.monotonic() + timeout_s
        while self.health() != health_pb2.HealthCheckResponse.SERVING:
            if time.monotonic() > deadline:
                raise AssertionError(f"not serving in {timeout_s} s:\n{self.log()}")
            time.sleep(0.2)

    def wait_until_healthy(self, service: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits for the health checks of all of a service's containers."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = [one["State"] for one in self.containers(service)]
            if states and all(s.get("Health", {}).get("Status") == "healthy" for s in states):
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{service}: not healthy in {timeout_s} s: {states}")
            time.sleep(1.0)

    def wait_for_text(self, text: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Waits for ``text`` among the latest lines of the services' logs."""
        deadline = time.monotonic() + timeout_s
        while text not in (log := self.log()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not printed within {timeout_s} s: {text}\n{log}")
            time.sleep(0.5)

    def wait_for_workers(self, count: int, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Waits until so many cpu-attention workers are registered."""
        kind = "pb.WorkerInfo.KIND_CPU_ATTN"
        self.wait_until(f"sum(w.kind == {kind} for w in info.workers) == {count}", timeout_s)

    def segments(self) -> list[str]:
        """Names in the shared memory that the services share."""
        holder = self.containers("shared-memory")[0]["Id"]
        return docker("exec", holder, "ls", "/dev/shm").split()

    @contextmanager
    def load(
        self, requests: Sequence[pb.GenerateRequest], streams: int = 4
    ) -> Iterator[list[tuple[int, Generation]]]:
        """Requests in turn, ``streams`` at a time, until the block ends; gives the results."""
        results: list[tuple[int, Generation]] = []
        over = threading.Event()

        def work(first: int) -> None:
            i = first
            while not over.is_set():
                results.append((i % len(requests), self.generate(requests[i % len(requests)])))
                i += streams

        with ThreadPoolExecutor(streams) as pool:
            running = [pool.submit(work, i) for i in range(streams)]
            try:
                yield results
            finally:
                over.set()
            for one in running:
                one.result()

    def down(self) -> None:
        """Ends everything, volumes too."""
        self.channel.close()
        self.compose("down", "--volumes", "--remove-orphans")

    def left_behind(self) -> list[str]:
        """Containers, networks and volumes of the project."""
        kinds = (("ps", "--all", "--quiet"), ("network", "ls", "--quiet"), ("volume", "ls", "-q"))
        return [i for kind in kinds for i in docker(*kind, "--filter", LABEL + self.name).split()]


def docker(*arguments: str) -> str:
    """Runs a command of the engine's client; fails with what it printed."""
    command = ["docker", *arguments]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {result.stderr}")
    return result.stdout
