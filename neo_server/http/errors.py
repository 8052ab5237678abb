"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from neo_server.errors import InvalidRequestError, NeoError, to_status

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_SHORT = 100  # characters of a refused value

# HTTP status, type and code of each gRPC status of the error tree.
_FORMS: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, _INVALID, None),
    grpc.StatusCode.UNAUTHENTICATED: (401, _INVALID, "invalid_api_key"),
    grpc.StatusCode.NOT_FOUND: (404, _INVALID, "model_not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, _INVALID, "request_id_in_use"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.UNAVAILABLE: (503, _SERVER, "service_unavailable"),
    grpc.StatusCode.INTERNAL: (500, _SERVER, "internal_error"),
}


def form_of(error: NeoError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    code, message = to_status(error)
    status, kind, name = _FORMS[code]
    param = error.param if isinstance(error, InvalidRequestError) else None
    return status, _body(message, kind, param, name)


def handle_errors(app: FastAPI) -> None:
    """Every answer that is no success has OpenAI's form."""
    app.add_exception_handler(NeoError, _neo_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _other_error)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _neo_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, NeoError)
    status, body = form_of(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, headers)


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        detail = f"the body is no JSON: {first['ctx']['error']}"
        return JSONResponse(_body(detail, _INVALID, None, None), 400)
    names = [_plain(part) for part in first["loc"][1:]]
    field = ".".join(names) or "the body"
    value = "" if first["type"] == "missing" else f" is {_shortened(first['input'])}"
    message = f"{field}{value}: {first['msg']}"
    return JSONResponse(_body(message, _INVALID, names[0] if names else None, None), 400)


async def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _INVALID if error.status_code < 500 else _SERVER
    body = _body(str(error.detail), kind, None, None)
    return JSONResponse(body, error.status_code, error.headers)


async def _other_error(_request: Request, error: Exception) -> JSONResponse:
    """A mistake of ours; the log has it."""
    message = f"internal error: {type(error).__name__}"
    return JSONResponse(_body(message, _SERVER, None, "internal_error"), 500)


def _plain(part: object) -> str:
    """A client's own name may be no Unicode."""
    return str(part).encode("ascii", "backslashreplace").decode()[:_SHORT]


def _shortened(value: object) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."
