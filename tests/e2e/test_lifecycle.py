"""However the server ends, no process stays, and after the next start no segment does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.processes import alive, family
from tests.helpers.server import RunningServer, request_of, running_server

SMALL = ("--max-model-len", "256", "--num-gpu-blocks-override", "32", "--kv-offloading-size", "0.1")


def _segments(instance: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"neo-{instance}*")]


def _wait_until_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_no_process_and_no_segment_stays(
    sent: signal.Signals, busy: bool, demo_model: Path, tmp_path: Path
) -> None:
    server = RunningServer(demo_model, tmp_path, *SMALL, "--shutdown-timeout", "1")
    instance = server.info().instance_id
    by_hand = server.start_worker()
    server.wait_until("sum(w.kind == pb.WorkerInfo.KIND_CPU_ATTN for w in info.workers) == 3")
    processes = family(server.process.pid) | {by_hand.pid}
    assert len(processes) >= 5
    assert _segments(instance)
    if busy:
        streams = [server.stub.Generate(request_of("Once upon", 240)) for _ in range(3)]
        for stream in streams:
            next(stream)
    server.process.send_signal(sent)
    server.process.wait(30.0)
    _wait_until_gone(processes)
    if sent is not signal.SIGKILL:
        assert server.process.returncode == 0
        assert _segments(instance) == []
    with running_server(demo_model, tmp_path, *SMALL) as following:
        assert _segments(instance) == []
        assert _segments(following.info().instance_id)
        assert len(following.generate(request_of("The", 2)).token_ids) == 2
    server.stop()


def test_sigterm_lets_running_streams_finish(demo_model: Path, tmp_path: Path) -> None:
    server = RunningServer(demo_model, tmp_path, *SMALL, "--shutdown-timeout", "60")
    stream = server.stub.Generate(request_of("Once upon a time", 100))
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    messages = list(stream)
    assert messages[-1].finish_info.num_output_tokens == 100
    assert server.process.wait(30.0) == 0
    server.stop()


def test_two_instances_share_a_host(demo_model: Path, tmp_path: Path) -> None:
    with (
        running_server(demo_model, tmp_path, *SMALL) as first,
        running_server(demo_model, tmp_path, *SMALL) as second,
    ):
        request = request_of("The capital of France is", 8)
        assert first.generate(request).token_ids == second.generate(request).token_ids


def test_a_gpu_worker_that_hangs_is_killed_and_respawned_and_streams_go_on(
    demo_model: Path, tmp_path: Path
) -> None:
    timeouts = ("--plan-timeout", "1", "--cpu-attn-timeout", "4")
    with running_server(demo_model, tmp_path, *SMALL, *timeouts) as server:
        request = request_of("Once upon a time", 60)
        expected = server.generate(request).token_ids
        gpu = next(w.pid for w in server.info().workers if w.kind == 1)
        stream = server.stub.Generate(request, timeout=240.0)
        got = [token for _ in range(5) for token in next(stream).delta.token_ids]
        os.kill(gpu, signal.SIGSTOP)
        got += [token for message in stream for token in message.delta.token_ids]
        assert got == expected
        assert all(w.pid != gpu for w in server.info().workers)
        server.assert_caches_end_empty()


def test_a_killed_gpu_worker_is_respawned_and_streams_go_on(
    demo_model: Path, tmp_path: Path
) -> None:
    with running_server(demo_model, tmp_path, *SMALL) as server:
        request = request_of("Once upon a time", 120)
        expected = server.generate(request).token_ids
        stream = server.stub.Generate(request, timeout=120.0)
        got: list[int] = []
        for message in stream:
            got += message.delta.token_ids
            if len(got) >= 20:
                break
        gpu = next(w.pid for w in server.info().workers if w.kind == 1)
        os.kill(gpu, signal.SIGKILL)
        for message in stream:
            got += message.delta.token_ids
        assert got == expected
        server.assert_caches_end_empty()
