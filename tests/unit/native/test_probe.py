"""The health check of worker containers, against real worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from neo_native import probe
from neo_native import segments as sg
from tests.unit.native.rig import geometry, is_stopped, rig, wait_until


def test_a_cpu_worker_is_healthy_while_its_heart_beats() -> None:
    with rig([64]) as r:
        process = r.spawn()
        r.wait_for_workers(1)
        role = probe.role_of(process.pid)
        assert role is not None
        assert role.location == r.segments.location
        assert role.byte == sg.cpu_worker_byte(0)
        assert probe.main(["--pid", str(process.pid)]) == 0
        # No time passes here: the clock is the caller's.
        assert "the last heartbeat is" in probe.check(role, time.monotonic() + 2 * probe.SILENT_S)


def test_of_two_workers_each_finds_its_own_row() -> None:
    with rig([64]) as r:
        pids = [r.spawn().pid for _ in range(2)]
        r.wait_for_workers(2)
        rows = {int(row["pid"]): i for i, row in enumerate(r.control.worker_rows()) if row["pid"]}
        for pid in pids:
            role = probe.role_of(pid)
            assert role is not None
            assert role.byte == sg.cpu_worker_byte(rows[pid])


def test_a_worker_that_leaves_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with rig([64]) as r:
        process = r.spawn()
        r.wait_for_workers(1)
        role = probe.role_of(process.pid)
        assert role is not None
        process.terminate()
        process.wait()
        assert "is in state 0" in probe.check(role, time.monotonic())
        assert probe.main(["--pid", str(process.pid)]) == 1
        assert str(process.pid) in capsys.readouterr().err


def test_a_gpu_worker_is_healthy_while_it_holds_its_lock() -> None:
    segments = sg.create_all(geometry())
    try:
        assert probe.role_of(os.getpid()) is None  # the server's own lock is no worker's
        other = sg.attach_all(segments.location.instance_id)
        assert other.try_lock(sg.gpu_worker_byte(0))
        assert probe.main(["--pid", str(os.getpid())]) == 0
        other.close()
        assert probe.main(["--pid", str(os.getpid())]) == 1
    finally:
        sg.unlink_all(segments)
        segments.close()


def test_a_process_that_is_no_worker_is_not_healthy() -> None:
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        wait_until(lambda: not is_stopped(sleeper.pid))
        assert probe.main(["--pid", str(sleeper.pid)]) == 1
    finally:
        sleeper.kill()
        sleeper.wait()
