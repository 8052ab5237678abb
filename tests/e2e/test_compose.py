"""docker-compose.yml on a real engine; skipped where there is none.

``make soak`` runs it. The images are built first, from a base image and package indices that the
variables of docs/deployment.md name.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.e2e.prompts import PROMPTS
from tests.helpers.compose import BUILD_TIMEOUT_S, Project, compose_command, docker
from tests.helpers.server import request_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(BUILD_TIMEOUT_S)]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
KINDS = 7  # segments of an instance
SETTINGS = {
    "NEO_CPU_ATTN_WORKERS": "2",
    "NEO_SHM_SIZE": "1gb",
    "NEO_KV_OFFLOADING_SIZE": "0.1",
    # The policy mixes GPU- and CPU-requests and pipelines, whatever it costs.
    "NEO_ARGS": "--scheduling-policy mixed --max-model-len 256 --max-num-seqs 8 "
    "--num-gpu-blocks-override 64 --cpu-attn-threads 1 --plan-timeout 15",
}
REQUESTS = [request_of(prompt, 24) for prompt in PROMPTS[:8]]
LONG = [request_of(prompt, 60) for prompt in PROMPTS[:4]]


@pytest.fixture(scope="module")
def project(demo_model: Path) -> Iterator[Project]:
    command = compose_command()
    if command is None:
        pytest.skip("no Docker engine with Compose")
    made = Project(command, demo_model, **SETTINGS)
    made.compose("build", timeout_s=BUILD_TIMEOUT_S)
    try:
        made.up(2)
        made.wait_until_serving()
        made.wait_for_workers(2)
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def expected(project: Project) -> list[list[int]]:
    """Tokens of REQUESTS, one at a time."""
    return [project.generate(request).token_ids for request in REQUESTS]


@pytest.fixture(scope="module")
def long_expected(project: Project) -> list[list[int]]:
    """Tokens of LONG, undisturbed."""
    return [result.token_ids for result in project.generate_all(LONG)]


def kill(container: dict[str, object]) -> None:
    """As a crash does: the engine restarts it. By its process, which is a root's privilege."""
    state = container["State"]
    assert isinstance(state, dict)
    try:
        os.kill(int(state["Pid"]), signal.SIGKILL)
    except (PermissionError, ProcessLookupError):
        docker("kill", str(container["Id"]))
        docker("start", str(container["Id"]))


def wait_for_results(project: Project, results: Sequence[object], count: int) -> None:
    """Until so many requests are over; the server says meanwhile that it serves, if it answers."""
    while len(results) < count:
        assert project.health() != NOT_SERVING
        time.sleep(0.2)


def test_it_is_healthy_and_serves_over_grpc_and_http(
    project: Project, expected: list[list[int]]
) -> None:
    assert all(len(tokens) == 24 for tokens in expected)
    with urllib.request.urlopen(f"http://{project.http_address}/health", timeout=30.0) as reply:
        assert reply.status == 200
    for service in ("server", "gpu-worker", "cpu-attn-worker"):
        project.wait_until_healthy(service)
    loads = project.loads()
    assert min(loads.num_cpu_decodes, loads.num_gpu_decodes) > 0


def test_nothing_in_a_container_is_root_and_only_shared_memory_is_shared(project: Project) -> None:
    holder = project.containers("shared-memory")[0]
    for service in ("shared-memory", "server", "gpu-worker", "cpu-attn-worker"):
        for container in project.containers(service):
            assert docker("exec", str(container["Id"]), "id", "-u").strip() not in ("", "0")
            assert container["HostConfig"]["PidMode"] == ""
            if service != "shared-memory":
                assert container["HostConfig"]["IpcMode"] == f"container:{holder['Id']}"
    assert len(project.segments()) == KINDS


def test_workers_are_scaled_while_requests_run(project: Project, expected: list[list[int]]) -> None:
    with project.load(REQUESTS) as results:
        for count in (4, 1, 2):
            before = len(results)
            project.up(count)
            project.wait_for_workers(count)
            wait_for_results(project, results, before + 4)
    assert all(result.token_ids == expected[i] for i, result in results)
    project.assert_caches_end_empty()


def test_neo_scale_names_the_command_that_scales(project: Project) -> None:
    server = project.containers("server")[0]["Id"]
    with pytest.raises(AssertionError, match="FAILED_PRECONDITION") as caught:
        docker("exec", server, "neo", "scale", "--cpu-attn-workers", "3")
    assert "--scale cpu-attn-worker=3" in str(caught.value)


@pytest.mark.parametrize("how", ["pause", "crash", "kill"])
def test_no_request_notices_what_happens_to_a_cpu_worker(
    project: Project, expected: list[list[int]], how: str
) -> None:
    worker = project.containers("cpu-attn-worker")[0]
    with project.load(REQUESTS) as results:
        if how == "pause":
            docker("pause", worker["Id"])
        elif how == "crash":
            kill(worker)
        else:
            docker("kill", worker["Id"])
            project.wait_for_workers(1)
        before = len(results)
        wait_for_results(project, results, before + 8)
        if how == "pause":
            docker("unpause", worker["Id"])
        project.up(2)
        project.wait_for_workers(2)
    assert all(result.token_ids == expected[i] for i, result in results)
    project.assert_caches_end_empty()


def test_streams_go_on_when_the_gpu_worker_is_killed(
    project: Project, long_expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(LONG)) as pool:
        running = [pool.submit(project.generate, request) for request in LONG]
        project.wait_until(f"loads.num_running_reqs == {len(LONG)}")
        kill(project.containers("gpu-worker")[0])
        results = [one.result() for one in running]
    assert [result.token_ids for result in results] == long_expected
    project.wait_until_serving()
    project.assert_caches_end_empty()


def test_a_gpu_worker_that_was_paused_too_long_leaves_and_its_successor_goes_on(
    project: Project, long_expected: list[list[int]]
) -> None:
    worker = project.containers("gpu-worker")[0]
    with ThreadPoolExecutor(len(LONG)) as pool:
        running = [pool.submit(project.generate, request) for request in LONG]
        project.wait_until(f"loads.num_running_reqs == {len(LONG)}")
        docker("pause", worker["Id"])
        while project.health() != NOT_SERVING:
            assert not any(one.done() for one in running)
        project.wait_for_text("is no child of this server")
        docker("unpause", worker["Id"])
        results = [one.result() for one in running]
    assert [result.token_ids for result in results] == long_expected
    assert project.containers("gpu-worker")[0]["RestartCount"] > worker["RestartCount"]
    project.wait_until_serving()
    project.assert_caches_end_empty()


def test_after_the_death_of_the_server_the_same_workers_serve_again(
    project: Project, expected: list[list[int]]
) -> None:
    before = {one["Id"] for one in project.containers("cpu-attn-worker")}
    instance = project.info().instance_id
    stream = project.stub.Generate(LONG[0], timeout=600.0)
    next(stream)
    kill(project.containers("server")[0])
    with pytest.raises(grpc.RpcError):
        list(stream)
    project.wait_until_serving()
    project.wait_for_workers(2)
    assert project.info().instance_id != instance
    assert {one["Id"] for one in project.containers("cpu-attn-worker")} == before
    assert len(project.segments()) == KINDS  # those of the dead server are gone
    assert project.generate(REQUESTS[0]).token_ids == expected[0]


def test_down_leaves_nothing(project: Project) -> None:
    """The last test: it ends the project."""
    stopped = project.containers("server")[0]
    project.compose("stop", "server")
    assert project.containers("server")[0]["State"]["ExitCode"] == 0, stopped
    assert project.segments() == []
    project.down()
    assert project.left_behind() == []  # the memory ends with the container that holds it
