"""The whole process: registration, rings, leaving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

import neo_native as native
from neo_native import RowKind, RowStatus
from neo_native import segments as shm
from protos import control_pb2, control_pb2_grpc
from protos.config import CacheConfig, DType, EngineConfig, SchedulerConfig, WorkerConfig
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import BLOCK_SIZE, MAX_LEN, make_geometry
from tests.helpers.tiny_llama import make_checkpoint

REPO = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0


class FakeServer(control_pb2_grpc.ControlServicer):
    """The server's side: segments, rings and the control service, without any policy."""

    def __init__(self, folder: Path, **geometry: int) -> None:
        self.config = EngineConfig(
            model_path=str(folder),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=32),
            scheduler=SchedulerConfig(max_model_len=MAX_LEN),
            worker=WorkerConfig(torch_threads=1, profile=False, cpu_attn_timeout_s=20 * TIMEOUT_S),
        )
        shape = make_geometry(ModelConfig.from_pretrained(folder), DType.FLOAT32, **geometry)
        self.segments = shm.create_all(shape)
        self.control = native.Control(self.segments.control)
        self.sequences = native.Sequences(self.segments.sequences, shape)
        self.steps = native.StepProducer(self.segments.steps, shape)
        self.results = native.ResultConsumer(self.segments.results, shape)
        self.ready: list[Any] = []
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        control_pb2_grpc.add_ControlServicer_to_server(self, self._grpc)
        self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        self._plan_id = 0

    def RegisterGpuWorker(self, request: Any, context: Any) -> Any:  # noqa: N802
        location = self.segments.location
        return control_pb2.RegisterGpuWorkerResponse(
            segments=control_pb2.Segments(instance_id=location.instance_id, prefix=location.prefix),
            config_json=self.config.model_dump_json(),
        )

    def ReportGpuReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.ready.append(request)
        return control_pb2.ReportGpuReadyResponse()

    def start_worker(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gpu_worker", "--server", self.address, "--spawned"]
        path = os.pathsep.join([str(REPO), str(Path(native.__file__).parent.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True
        )

    def send(self, slot: int, kind: RowKind, start: int, tokens: list[int]) -> None:
        step = self.steps.acquire()
        assert step is not None
        self._plan_id += 1
        step.header["plan_id"] = self._plan_id
        step.header["n_rows"] = (1, 0, 0)
        step.header["n_tokens"] = len(tokens)
        step.header["n_swaps"] = 0
        step.header["rank"] = 0
        step.rows[0] = (slot, kind, start, len(tokens), 0, 1, 0, 0)
        step.tokens[: len(tokens)] = tokens
        self.steps.publish()

    def receive(self) -> Any:
        """Status, token and logprob of the only row."""
        assert self.results.wait(TIMEOUT_S)
        slot = self.results.front()
        assert slot is not None
        assert slot.header["plan_id"] == self._plan_id
        assert slot.header["n_rows"] == 1
        assert slot.header["elapsed"] > slot.header["linear"][0] > 0
        row = slot.rows[0].copy()
        self.results.release()
        return row

    def close(self) -> None:
        self._grpc.stop(None)
        shm.unlink_all(self.segments)
        self.segments.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return folder, make_checkpoint(folder)


@pytest.fixture
def server(checkpoint: Any) -> Iterator[FakeServer]:
    made = FakeServer(checkpoint[0])
    made.sequences.params["top_p"] = 1.0
    made.sequences.block_table[:2] = np.arange(32).reshape(2, 16)
    made.sequences.page_table[:2] = np.arange(16).reshape(2, 8)
    yield made
    made.close()


def end(worker: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and log, within the time limit."""
    try:
        _, log = worker.communicate(timeout=TIMEOUT_S)
    finally:
        worker.kill()
    return worker.returncode, log


def test_it_registers_serves_plans_and_leaves_on_sigterm(
    checkpoint: Any, server: FakeServer
) -> None:
    worker = server.start_worker()
    try:
        tokens = [5, 9, 30, 31, 32]
        with torch.no_grad():
            right = checkpoint[1](torch.tensor([tokens])).logits[0]
        server.send(0, RowKind.PREFILL_GPU, 0, tokens[:4])
        row = server.receive()
        assert row["status"] == RowStatus.SAMPLED
        assert row["token"] == right[3].argmax()
        assert row["logprob"] == pytest.approx(float(right[3].log_softmax(-1).max()), abs=1e-4)
        assert [(r.num_gpu_blocks, r.device) for r in server.ready] == [(32, "cpu")]
        assert server.segments.is_locked(shm.gpu_worker_byte(0))
        server.send(0, RowKind.DECODE_GPU, 4, tokens[4:])
        assert server.receive()["token"] == right[4].argmax()
        worker.send_signal(signal.SIGINT)  # the terminal's Ctrl-C is the server's affair
        server.send(1, RowKind.PREFILL_CPU, 0, tokens)
        assert server.receive()["token"] == right[4].argmax()
        worker.send_signal(signal.SIGTERM)
    finally:
        status, log = end(worker)
    assert status == 0, log
    assert not server.segments.is_locked(shm.gpu_worker_byte(0))


@pytest.mark.parametrize("how", ["stopping", "lock", "given up"])
def test_it_leaves_when_nobody_waits_for_it(server: FakeServer, how: str) -> None:
    worker = server.start_worker()
    try:
        server.send(0, RowKind.PREFILL_GPU, 0, [5, 6])
        server.receive()
        if how == "stopping":
            server.control.set_stopping()
        elif how == "given up":
            server.segments.try_lock(shm.gpu_given_up_byte(0))
        else:
            shm.unlock(server.segments.fd, shm.SERVER_BYTE)
    finally:
        status, log = end(worker)
    assert status == 0, log


def test_sigterm_ends_a_wait_for_cpu_workers_that_do_not_exist(server: FakeServer) -> None:
    worker = server.start_worker()
    try:
        server.send(0, RowKind.PREFILL_CPU, 0, [5, 6])
        server.receive()
        server.send(0, RowKind.DECODE_CPU, 2, [7])
        assert not server.results.wait(0.5)
        worker.send_signal(signal.SIGTERM)
    finally:
        status, log = end(worker)
    assert status == 0, log
    assert server.receive()["status"] == RowStatus.VOIDED


def test_a_bad_plan_ends_it_with_a_named_error(server: FakeServer) -> None:
    worker = server.start_worker()
    try:
        server.send(0, RowKind.PREFILL_GPU, 0, [5, 320])
    finally:
        status, log = end(worker)
    assert status == 1
    assert "BadPlanError: plan 1: token is 320; the limit is 319" in log


def test_segments_of_another_model_are_refused(checkpoint: Any) -> None:
    server = FakeServer(checkpoint[0], n_layers=7)
    try:
        status, log = end(server.start_worker())
    finally:
        server.close()
    assert status == 1
    assert "GeometryError: n_layers is 7 in the segments, 3 for" in log
