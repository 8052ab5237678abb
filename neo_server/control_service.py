"""The control service: workers register here and ask for their configuration."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from neo_server.plan import Mode
from neo_server.state import ServerState
from neo_server.table_cost import ProfileTable
from protos import control_pb2 as pb
from protos import control_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


class ControlService(rpc.ControlServicer):
    """``neo.control.v1.Control``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def RegisterGpuWorker(  # noqa: N802
        self, request: pb.RegisterGpuWorkerRequest, context: Context
    ) -> pb.RegisterGpuWorkerResponse:
        """Empties the rings for it; refused while another lives."""
        if request.rank != 0:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"rank is {request.rank}; it must be 0"
            )
        if self._state.memory.gpu_worker_lives():
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"gpu worker {self._state.gpu.pid} of rank {request.rank} is alive",
            )
        self._state.memory.expect_gpu_worker()
        await self._state.gpu.prepare(request.pid)
        return pb.RegisterGpuWorkerResponse(
            segments=self._segments(), config_json=self._state.resolved.config.model_dump_json()
        )

    async def ReportGpuReady(  # noqa: N802
        self, request: pb.ReportGpuReadyRequest, context: Context
    ) -> pb.ReportGpuReadyResponse:
        """The model is loaded."""
        if request.pid != self._state.gpu.pid:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"pid is {request.pid}; registered is {self._state.gpu.pid}",
            )
        if request.num_gpu_blocks == 0:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "num_gpu_blocks is 0; it must be at least 1"
            )
        try:
            table = ProfileTable.parse(request.profile_json) if request.profile_json else None
            modes = frozenset(Mode(name) for name in request.plan_modes)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"profile or plan_modes: {error}")
        _log.info("gpu worker on %s: %d GPU blocks", request.device, request.num_gpu_blocks)
        self._state.gpu.report_ready(request.num_gpu_blocks, request.device, table, modes)
        return pb.ReportGpuReadyResponse()

    async def RegisterCpuAttnWorker(  # noqa: N802
        self, request: pb.RegisterCpuAttnWorkerRequest, context: Context
    ) -> pb.RegisterCpuAttnWorkerResponse:
        """Tells where the segments are; the worker takes a row by itself."""
        self._state.memory.clear_dead_rows()
        worker = self._state.resolved.config.worker
        return pb.RegisterCpuAttnWorkerResponse(
            segments=self._segments(),
            num_threads=worker.cpu_attn_threads,
            pin_threads=worker.pin_cpu_attn_threads,
            reserved_cores=worker.reserved_cores,
        )

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:  # noqa: N802
        """Sets how many cpu-attention workers the server itself runs."""
        if self._state.supervisor is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is starting")
        if not self._state.options.spawn_cpu_attn_workers:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this server runs no cpu-attention workers itself (--no-spawn-cpu-attn-workers); "
                "with Docker Compose: docker compose up --detach --no-recreate --scale "
                f"cpu-attn-worker={request.cpu_attn_workers}",
            )
        limit = self._state.memory.max_workers
        if request.cpu_attn_workers > limit:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"cpu_attn_workers is {request.cpu_attn_workers}; it must be at most {limit}",
            )
        previous = self._state.supervisor.scale(request.cpu_attn_workers)
        _log.info("cpu-attention workers: %d -> %d", previous, request.cpu_attn_workers)
        return pb.ScaleResponse(previous=previous)

    def _segments(self) -> pb.Segments:
        location = self._state.memory.location
        return pb.Segments(
            instance_id=location.instance_id,
            prefix=location.prefix,
            shm_dir=location.shm_dir or "",
        )
