"""The public service's unary calls, within the server's own process."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import grpc

from neo_server.errors import from_status
from neo_server.frontend import Frontend
from neo_server.service import InferenceService
from neo_server.state import ServerState
from protos import inference_pb2 as pb


class _Context:
    """Of a call without a wire: a refusal is an exception."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise from_status(code, details)


class LocalCalls:
    """What gRPC clients are told, from the same methods."""

    def __init__(self, state: ServerState) -> None:
        self.frontend = Frontend(state)
        self._service = InferenceService(state)
        self._context = cast("grpc.aio.ServicerContext[Any, Any]", _Context())

    async def abort(self, request_id: str) -> None:
        """Idempotent."""
        await self._service.Abort(pb.AbortRequest(request_id=request_id), self._context)

    async def loads(self) -> pb.GetLoadsResponse:
        """See protos/inference.proto."""
        return await self._service.GetLoads(pb.GetLoadsRequest(), self._context)

    async def server_info(self) -> pb.GetServerInfoResponse:
        """See protos/inference.proto."""
        return await self._service.GetServerInfo(pb.GetServerInfoRequest(), self._context)

    async def model_info(self) -> pb.GetModelInfoResponse:
        """See protos/inference.proto."""
        return await self._service.GetModelInfo(pb.GetModelInfoRequest(), self._context)
