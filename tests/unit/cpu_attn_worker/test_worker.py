from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cpu_attn_worker.__main__ import main, parse_args
from neo_native import segments as sg
from protos import control_pb2, control_pb2_grpc
from tests.unit.native.rig import ROOT, Plan, Rig, rig, wait_until


class Registrar(control_pb2_grpc.ControlServicer):
    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.pids: list[int] = []

    def RegisterCpuAttnWorker(  # noqa: N802
        self,
        request: control_pb2.RegisterCpuAttnWorkerRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.RegisterCpuAttnWorkerResponse:
        self.pids.append(request.pid)
        return control_pb2.RegisterCpuAttnWorkerResponse(
            segments=control_pb2.Segments(instance_id=self.instance_id), num_threads=2
        )


class Server:
    """A rig with the server's gRPC in front, and real worker processes."""

    def __init__(self, r: Rig) -> None:
        self.rig = r
        self.registrar = Registrar(r.segments.location.instance_id)
        self.grpc = grpc.server(ThreadPoolExecutor(2))
        control_pb2_grpc.add_ControlServicer_to_server(self.registrar, self.grpc)
        self.address = f"127.0.0.1:{self.grpc.add_insecure_port('127.0.0.1:0')}"
        self.grpc.start()

    def spawn(self, *flags: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in [str(ROOT), *sys.path] if entry)
        process = subprocess.Popen(
            [sys.executable, "-m", "cpu_attn_worker", "--server", self.address, *flags],
            env=os.environ | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
        )
        self.rig.processes.append(process)
        return process


@pytest.fixture
def server() -> Iterator[Server]:
    with rig([100, 40], max_workers=2) as r:
        made = Server(r)
        yield made
        made.grpc.stop(None).wait()
        for process in r.processes:
            process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()


def test_a_worker_registers_attends_and_leaves_its_row_empty_on_sigterm(server: Server) -> None:
    process = server.spawn()
    server.rig.wait_for_workers(1)
    assert server.registrar.pids == [process.pid]
    row = server.rig.control.worker_rows()[0]
    assert (int(row["pid"]), int(row["n_threads"]), int(row["spawned"])) == (process.pid, 2, 0)
    Plan(server.rig, [0, 1], [100, 40]).run(server.rig.exchange())
    wait_until(lambda: int(server.rig.control.worker_rows()["tasks"][0]) > 0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert int(server.rig.control.worker_rows()["state"][0]) == 0
    assert not server.rig.segments.is_locked(sg.cpu_worker_byte(0))


def test_threads_pinning_and_parentage_come_from_the_flags(server: Server) -> None:
    process = server.spawn("--threads", "1", "--pin", "--spawned")
    server.rig.wait_for_workers(1)
    row = server.rig.control.worker_rows()[0]
    assert (int(row["n_threads"]), int(row["spawned"])) == (1, 1)
    first_core = min(os.sched_getaffinity(0))
    assert not server.rig.control.lease_core(first_core, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert server.rig.control.lease_core(first_core, 1)


def test_with_no_core_free_a_worker_runs_unpinned_and_says_so(server: Server) -> None:
    for core in os.sched_getaffinity(0):
        server.rig.control.lease_core(core, 1)
    process = server.spawn("--pin")
    server.rig.wait_for_workers(1)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert re.search(rb"0 of 2 threads found a free core \(.*0 reserved\); running unpinned", log)


@pytest.mark.parametrize("how", ["stopping", "drain", "lock"])
def test_a_worker_leaves_when_the_server_asks_or_is_gone(server: Server, how: str) -> None:
    process = server.spawn()
    server.rig.wait_for_workers(1)
    if how == "stopping":
        server.rig.control.set_stopping()
    elif how == "drain":
        server.rig.control.request_drain(0)
    else:
        sg.unlock(server.rig.segments.fd, sg.SERVER_BYTE)
    assert process.wait(30) == 0


def test_a_drained_row_is_taken_by_the_next_worker_which_stays(server: Server) -> None:
    first = server.spawn()
    server.rig.wait_for_workers(1)
    server.rig.control.request_drain(0)
    assert first.wait(30) == 0
    second = server.spawn()
    server.rig.wait_for_workers(1)
    assert int(server.rig.control.worker_rows()["pid"][0]) == second.pid
    assert not server.rig.control.draining(0)


def test_a_full_worker_table_is_an_error_that_names_the_limit(server: Server) -> None:
    server.spawn()
    server.spawn()
    server.rig.wait_for_workers(2)
    third = server.spawn()
    _, log = third.communicate(timeout=30)
    assert third.returncode == 1
    assert b"all 2 rows of the worker table (max_workers) are taken" in log


def test_a_server_that_refuses_is_an_error_not_a_traceback(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.registrar.instance_id = "doesnotexist"
    assert main(["--server", server.address]) == 1
    assert "neo-doesnotexist-control" in caplog.text


@pytest.mark.parametrize("threads", ["0", "513", "x"])
def test_a_bad_thread_count_is_refused(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--server", "h:1", "--threads", threads])
    assert "--threads" in capsys.readouterr().err
