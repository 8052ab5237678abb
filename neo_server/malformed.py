"""Requests whose bytes are no message of their type are refused by field, not as internal errors.

gRPC answers INTERNAL when a request cannot be parsed, which a string that is no UTF-8 brings about.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import empty_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from neo_server.errors import InvalidRequestError, to_status
from protos import inference_pb2, vllm_engine_pb2

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_BYTES = 2  # the wire type of strings and messages

_REQUESTS = {
    f"/{service.full_name}/{method.name}": method.input_type
    for module in (inference_pb2, vllm_engine_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For the public services."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See ``grpc.aio.ServerInterceptor``."""
        handler: grpc.RpcMethodHandler[Any, Any] = await continuation(details)
        descriptor = _REQUESTS.get(str(details.method))
        if (
            handler is None
            or descriptor is None
            or inspect.isasyncgenfunction(
                handler.unary_stream  # GetTokenizer, whose request is empty
            )
        ):
            return handler
        return _tolerant(handler, descriptor)


def _tolerant(
    handler: grpc.RpcMethodHandler[Any, Any], descriptor: Descriptor
) -> grpc.RpcMethodHandler[Any, Any]:
    """Parses as before; what cannot be parsed reaches a behaviour that refuses it."""
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    behave: Any = getattr(handler, kind)
    parse = handler.request_deserializer

    def parsed(data: bytes) -> Message | InvalidRequestError:
        try:
            return parse(data)  # type: ignore[no-any-return,misc]
        except DecodeError:
            return InvalidRequestError(why(data, descriptor))

    async def checked(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, InvalidRequestError):
            await _refuse(request, context)
        return await behave(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    tolerant: grpc.RpcMethodHandler[Any, Any] = make(checked, parsed, handler.response_serializer)
    return tolerant


async def _refuse(
    error: InvalidRequestError, context: grpc.aio.ServicerContext[Any, Any]
) -> NoReturn:
    code, message = to_status(error)
    await context.abort(code, message)
    raise AssertionError("abort returned")


def why(data: bytes, descriptor: Descriptor) -> str:
    """What is wrong with the bytes of a message of this type."""
    found = _not_utf8(data, descriptor, "")
    return found or f"the request has {len(data)} bytes; they must be a {descriptor.full_name}"


def _not_utf8(data: bytes, descriptor: Descriptor, prefix: str) -> str:
    """Names the first string field that is no UTF-8; empty: there is none."""
    message = empty_pb2.Empty()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return ""
    parts = UnknownFieldSet(message)
    for part in (parts[i] for i in range(len(parts))):
        field = descriptor.fields_by_number.get(part.field_number)
        if field is None or part.wire_type != _BYTES:
            continue
        name = prefix + field.name
        found = ""
        if field.message_type is not None:
            found = _not_utf8(part.data, field.message_type, f"{name}.")
        elif field.type == FieldDescriptor.TYPE_STRING:
            found = _wrong_text(part.data, name)
        if found:
            return found
    return ""


def _wrong_text(data: bytes, name: str) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        return f"{name} has byte 0x{byte:02x} at {error.start}; it must be valid UTF-8"
    return ""
