"""The gRPC servers: the public service and the control service, and where they listen."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from neo_server.api_key import ApiKeyInterceptor
from neo_server.control_service import ControlService
from neo_server.errors import ConfigurationError
from neo_server.malformed import MalformedInterceptor
from neo_server.service import InferenceService
from neo_server.service_names import SERVICES
from neo_server.state import ServerState
from neo_server.tls import Tls
from neo_server.unix_socket import address_of, claim, socket_path
from neo_server.vllm_engine import VllmEngineService
from protos import control_pb2_grpc, inference_pb2_grpc, vllm_engine_pb2_grpc

_MESSAGE_ROOM = 1 << 20  # bytes of a request beside its prompt
_MIN_MESSAGE = 1 << 24  # bytes that are read of any request, so that its refusal can name a field
_MORE_RPCS = 256  # beside requests that wait, run or are being read to their end
_CONTROL_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))
# A client that waits for a long prefill hears nothing, so it may ask twice a second whether the
# server lives (gRPC's own limit, once in five minutes, ends the connection on the third ping). The
# server asks too, so that the requests of a host that vanished end.
_KEEPALIVE = (
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit on the server's own
)


def prompt_bytes(state: ServerState) -> int:
    """Of the longest prompt: UTF-8 takes up to 4 bytes a character, a token id up to 5."""
    max_model_len = state.resolved.config.scheduler.max_model_len
    return max_model_len * max(4 * state.tokenizer.longest_token, 5)


def control_server(state: ServerState) -> grpc.aio.Server:
    """For workers and ``neo scale``."""
    server = grpc.aio.server(options=_CONTROL_OPTIONS, interceptors=_interceptors(state))
    register = control_pb2_grpc.add_ControlServicer_to_server
    register(ControlService(state), server)  # type: ignore[no-untyped-call]
    return server


def public_server(state: ServerState, health: HealthServicer) -> grpc.aio.Server:
    """``Inference``, ``VllmEngine``, health and reflection."""
    limit = min(max(prompt_bytes(state) + _MESSAGE_ROOM, _MIN_MESSAGE), (1 << 31) - 1)
    max_num_seqs = state.resolved.config.scheduler.max_num_seqs
    server = grpc.aio.server(
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),
            *_KEEPALIVE,
        ),
        maximum_concurrent_rpcs=2 * (state.options.max_num_queued_reqs + max_num_seqs) + _MORE_RPCS,
        interceptors=[*_interceptors(state), MalformedInterceptor()],
    )
    register = inference_pb2_grpc.add_InferenceServicer_to_server
    register(InferenceService(state), server)  # type: ignore[no-untyped-call]
    register = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
    register(VllmEngineService(state), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _interceptors(state: ServerState) -> list[ApiKeyInterceptor]:
    key = state.options.api_key
    return [] if key is None else [ApiKeyInterceptor(key)]


async def listen(server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None) -> str:
    """Starts it; returns its address. Raises ``ConfigurationError``.

    ``host`` may be ``unix:///path``; who may connect is then said by the modes of the path.
    """
    path = socket_path(host)
    bracketed = f"[{host}]" if ":" in host else host
    target = f"{bracketed}:{port}" if path is None else address_of(path)
    if path is not None:
        claim(path)
    try:
        bound = (
            server.add_insecure_port(target)
            if tls is None
            else server.add_secure_port(target, tls.credentials())
        )
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {target}: {error}") from error
    await server.start()
    return f"{bracketed}:{bound}" if path is None else target
