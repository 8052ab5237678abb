"""The life of a cpu-attention worker: register, take a row, attend until told to leave.

It owns nothing but its row of the worker table and its output area, so it may join, leave or die at
any moment; what it had claimed is done by others.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from cpu_attn_worker.core_leases import lease_cores, running_on
from neo_native import AttentionWorker, Control, active_isa, segments
from neo_native.lifetime import die_with_parent
from neo_native.timeline import Timeline
from protos import control_pb2, control_pb2_grpc
from protos.credentials import key_metadata

logger = logging.getLogger("cpu_attn_worker")

HEARTBEAT_S = 0.2
REGISTER_TIMEOUT_S = 30.0


class WorkerError(RuntimeError):
    """The worker cannot join; the message says why."""


def run(
    server_address: str,
    threads: int | None,
    fault: str = "",
    *,
    pin: bool | None = None,
    reserved_cores: int | None = None,
    spawned: bool = False,
) -> None:
    """Joins the server at ``HOST:PORT`` and works until it is told to leave.

    `threads`: attention threads. `pin`: lease a core for each. `reserved_cores`: how many of the
    usable cores no thread is pinned to. None takes the server's setting. `spawned`: a child of the
    server, which dies with it. Raises WorkerError when the server cannot be reached or its worker
    table is full, and neo_native's errors when the segments do not fit.
    """
    if spawned:
        die_with_parent()
    response = _register(server_address)
    attached = segments.attach_all(
        response.segments.instance_id,
        response.segments.shm_dir or None,
        cpu_cache_writable=False,
    )
    try:
        serve(
            attached,
            threads or response.num_threads or 1,
            fault,
            pin=response.pin_threads if pin is None else pin,
            reserved_cores=response.reserved_cores if reserved_cores is None else reserved_cores,
            spawned=spawned,
        )
    finally:
        attached.close()


def serve(
    attached: segments.SegmentSet,
    threads: int,
    fault: str = "",
    *,
    pin: bool = False,
    reserved_cores: int = 0,
    spawned: bool = False,
) -> None:
    """The part of `run` after registration."""
    control = Control(attached.control)
    row = _take_row(attached, control, threads, spawned)
    try:
        leased = lease_cores(control, row, threads, reserved_cores) if pin else []
        with running_on(leased):
            worker = AttentionWorker(
                control,
                attached.work,
                attached.exchange,
                attached.cpu_cache,
                attached.sequences,
                row,
                threads,
                leased,
                fault,
            )
        if (timeline := Timeline.attach(attached.location)) is not None:
            worker.record(timeline.memory)
        with _leave_on_signal() as leaving:
            worker.start()
            where = f"cores {leased}" if leased else "unpinned"
            logger.info("row %d: %d threads, %s, %s kernel", row, threads, where, active_isa())
            try:
                reason = _beat(attached, control, worker, row, leaving)
            finally:
                worker.stop()
        logger.info("row %d: left, %s", row, reason)
    finally:
        control.clear_row(row)
        segments.unlock(attached.fd, segments.cpu_worker_byte(row))


def _beat(
    attached: segments.SegmentSet,
    control: Control,
    worker: AttentionWorker,
    row: int,
    leaving: threading.Event,
) -> str:
    """Publishes counters until there is a reason to leave; returns it."""
    while True:
        if leaving.wait(HEARTBEAT_S):
            return "signalled"
        worker.heartbeat()
        if control.stopping:
            return "the server is stopping"
        if control.draining(row):
            return "drained by the server"
        if not attached.is_locked(segments.SERVER_BYTE):
            return "the server is gone"


def _register(server_address: str) -> control_pb2.RegisterCpuAttnWorkerResponse:
    request = control_pb2.RegisterCpuAttnWorkerRequest(pid=os.getpid())
    # The channel is only for this call: after it, shared memory and a file lock say everything.
    with grpc.insecure_channel(server_address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            response: control_pb2.RegisterCpuAttnWorkerResponse = stub.RegisterCpuAttnWorker(
                request,
                timeout=REGISTER_TIMEOUT_S,
                wait_for_ready=True,
                metadata=key_metadata(),
            )
        except grpc.RpcError as error:
            raise WorkerError(f"registering with {server_address}: {error}") from error
    return response


def _take_row(attached: segments.SegmentSet, control: Control, threads: int, spawned: bool) -> int:
    """The first row whose lock is free: its former process, if any, is dead for sure."""
    max_workers = int(attached.geometry["max_workers"])
    for row in range(max_workers):
        if attached.try_lock(segments.cpu_worker_byte(row)):
            control.take_row(row, os.getpid(), threads, spawned)
            return row
    raise WorkerError(f"all {max_workers} rows of the worker table (max_workers) are taken")


@contextmanager
def _leave_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set. Handlers exist in the main thread only."""
    leaving = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield leaving
        return
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.signal(kind, lambda *_: leaving.set()) for kind in kinds}
    try:
        yield leaving
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
