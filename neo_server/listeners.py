"""The gRPC servers: the public service and the control service, and where they listen."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from neo_server.api_key import ApiKeyInterceptor
from neo_server.control_service import ControlService
from neo_server.errors import ConfigurationError
from neo_server.service import InferenceService
from neo_server.service_names import SERVICES
from neo_server.state import ServerState
from protos import control_pb2_grpc, inference_pb2_grpc

_MESSAGE_ROOM = 1 << 20  # bytes of a request beside its prompt
_MORE_RPCS = 256  # beside requests that wait, run or are being read to their end
_CONTROL_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))


def prompt_bytes(state: ServerState) -> int:
    """Of the longest prompt: UTF-8 takes up to 4 bytes a character, a token id up to 5."""
    max_model_len = state.resolved.config.scheduler.max_model_len
    return max_model_len * max(4 * state.tokenizer.longest_token, 5)


def control_server(state: ServerState) -> grpc.aio.Server:
    """For workers and ``neo scale``."""
    server = grpc.aio.server(options=_CONTROL_OPTIONS)
    register = control_pb2_grpc.add_ControlServicer_to_server
    register(ControlService(state), server)  # type: ignore[no-untyped-call]
    return server


def public_server(state: ServerState, health: HealthServicer) -> grpc.aio.Server:
    """``Inference``, health and reflection."""
    limit = min(prompt_bytes(state) + _MESSAGE_ROOM, (1 << 31) - 1)
    max_num_seqs = state.resolved.config.scheduler.max_num_seqs
    key = state.options.api_key
    server = grpc.aio.server(
        options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", limit)),
        maximum_concurrent_rpcs=2 * (state.options.max_num_queued_reqs + max_num_seqs) + _MORE_RPCS,
        interceptors=[] if key is None else [ApiKeyInterceptor(key)],
    )
    register = inference_pb2_grpc.add_InferenceServicer_to_server
    register(InferenceService(state), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


async def listen(server: grpc.aio.Server, host: str, port: int) -> str:
    """Starts it; returns its address. Raises ``ConfigurationError``."""
    bracketed = f"[{host}]" if ":" in host else host
    try:
        bound = server.add_insecure_port(f"{bracketed}:{port}")
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {bracketed}:{port}: {error}") from error
    await server.start()
    return f"{bracketed}:{bound}"
