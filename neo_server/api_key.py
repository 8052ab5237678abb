"""Who may use the public services, where ``--api-key`` is given."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from neo_server.errors import UnauthenticatedError, to_status

_OPEN = ("/grpc.health.v1.Health/",)
_SCHEME = "bearer "

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


def check_api_key(authorization: str | None, api_key: str | None) -> None:
    """Raises ``UnauthenticatedError`` unless the header carries the key, or there is none."""
    if api_key is None:
        return
    given = authorization or ""
    if not given.lower().startswith(_SCHEME):
        raise UnauthenticatedError("authorization is missing; it must be 'Bearer KEY'")
    if not hmac.compare_digest(given[len(_SCHEME) :].strip().encode(), api_key.encode()):
        raise UnauthenticatedError("authorization carries another key than the server's")


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the key; health answers to everybody."""

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See ``grpc.aio.ServerInterceptor``."""
        handler: grpc.RpcMethodHandler[Any, Any] = await continuation(details)
        if handler is None or str(details.method).startswith(_OPEN):
            return handler
        given = dict(details.invocation_metadata or ()).get("authorization")
        try:
            check_api_key(given if isinstance(given, str) else None, self._api_key)
        except UnauthenticatedError as error:
            return _refusal(handler, error)
        return handler


def _refusal(
    handler: grpc.RpcMethodHandler[Any, Any], error: UnauthenticatedError
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that aborts."""

    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        code, message = to_status(error)
        await context.abort(code, message)
        raise AssertionError("abort returned")

    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    refused: grpc.RpcMethodHandler[Any, Any] = make(
        refuse, handler.request_deserializer, handler.response_serializer
    )
    return refused
