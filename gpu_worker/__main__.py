"""``python -m gpu_worker --server HOST:PORT``: registers, loads the model, serves plans."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from types import FrameType

import grpc

from gpu_worker.abandonment import end_when_abandoned
from gpu_worker.errors import GpuWorkerError
from gpu_worker.worker import GpuWorker, device_name
from neo_native import NativeError, logs
from neo_native.lifetime import die_with_parent
from neo_native.segments import SegmentSet, attach_all, gpu_worker_byte
from protos import control_pb2, control_pb2_grpc
from protos.config import EngineConfig
from protos.credentials import key_metadata
from protos.model_config import UnsupportedModelError

logger = logging.getLogger("gpu_worker")

CONTROL_TIMEOUT_S = 30.0


class LeaveFlag:
    """Set by SIGTERM (and by SIGINT when the worker was started by hand)."""

    def __init__(self, spawned: bool) -> None:
        self._set = False
        signal.signal(signal.SIGTERM, self._on_signal)
        # Ctrl-C reaches the whole process group, and the server drains with its workers alive.
        signal.signal(signal.SIGINT, signal.SIG_IGN if spawned else self._on_signal)

    def __call__(self) -> bool:
        """Whether a signal asked this process to leave."""
        return self._set

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._set = True


def register(stub: control_pb2_grpc.ControlStub, rank: int) -> tuple[EngineConfig, SegmentSet]:
    """Asks the server for the configuration, maps the segments and takes the rank's lock."""
    response = stub.RegisterGpuWorker(
        control_pb2.RegisterGpuWorkerRequest(pid=os.getpid(), rank=rank),
        timeout=CONTROL_TIMEOUT_S,
        wait_for_ready=True,
        metadata=key_metadata(),
    )
    config = EngineConfig.model_validate_json(response.config_json)
    segments = attach_all(response.segments.instance_id, response.segments.shm_dir or None)
    if not segments.try_lock(gpu_worker_byte(rank)):
        raise GpuWorkerError(f"another gpu worker of rank {rank} is alive")
    return config, segments


def serve(server: str, rank: int, leave: LeaveFlag) -> None:
    """From registration to the last plan."""
    with grpc.insecure_channel(server) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        config, segments = register(stub, rank)
        end_when_abandoned(segments, rank)
        worker = GpuWorker(config, segments, rank, leave)
        ready = control_pb2.ReportGpuReadyRequest(
            pid=os.getpid(),
            rank=rank,
            num_gpu_blocks=worker.num_gpu_blocks,
            device=device_name(worker.device),
            profile_json=worker.profile(),
            plan_modes=worker.plan_modes,
        )
        stub.ReportGpuReady(ready, timeout=CONTROL_TIMEOUT_S, metadata=key_metadata())
    logger.info("ready on %s, %d GPU blocks", device_name(worker.device), worker.num_gpu_blocks)
    worker.run()


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_worker", description="A gpu worker of NEO.")
    parser.add_argument("--server", required=True, help="HOST:PORT of the control service")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--spawned", action="store_true", help="end with the parent process")
    args = parser.parse_args()
    logs.configure(f"gpu_worker-{args.rank}")
    if args.spawned:
        die_with_parent()
    try:
        serve(args.server, args.rank, LeaveFlag(args.spawned))
    except (GpuWorkerError, UnsupportedModelError, NativeError, grpc.RpcError, OSError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
