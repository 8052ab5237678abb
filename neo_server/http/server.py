"""uvicorn in the server's own event loop; signals are the server's to handle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neo_server import __version__
from neo_server.errors import ConfigurationError
from neo_server.http.api import Api
from neo_server.http.errors import handle_errors
from neo_server.state import ServerState
from neo_server.tls import Tls
from neo_server.unix_socket import address_of, claim, socket_path

_BACKLOG = 2048
_LEAST_GRACE_S = 0.1  # connections that nothing runs on close in it
_MIN_BODY = 1 << 24  # bytes that a body may have whatever the model's context is


class BodyLimit:
    """Refuses a body of more than ``limit`` bytes before it is read whole."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        size = 0

        async def limited() -> Message:
            nonlocal size
            self._check(int(declared))
            message = await receive()
            size += len(message.get("body", b""))
            self._check(size)
            return message

        await self._app(scope, limited, send)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise HTTPException(413, f"the body has {size} bytes; it must be <= {self._limit}")


def make_app(state: ServerState, max_prompt_bytes: int) -> FastAPI:
    """``max_prompt_bytes``: of the longest prompt that the model can take."""
    app = FastAPI(title="NEO", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(Api(state).router())
    handle_errors(app)
    app.add_middleware(BodyLimit, limit=max(max_prompt_bytes, _MIN_BODY))
    return app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles none."""
        yield


class HttpServer:
    """Listens from ``start`` to ``stop``."""

    def __init__(self, app: FastAPI, host: str, port: int, tls: Tls | None = None) -> None:
        """Binds the address; ``host`` may be ``unix:///path``. Raises ``ConfigurationError``."""
        self._path = socket_path(host)
        if self._path is None:
            self._socket, self.address = _bind(host, port)
        else:
            self._socket, self.address = _bind_path(self._path)
        config = uvicorn.Config(
            app,
            ssl_certfile=None if tls is None else tls.certfile,
            ssl_keyfile=None if tls is None else str(tls.keyfile),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers from now on."""
        serving = self._server.serve(sockets=[self._socket])
        self._task = asyncio.get_running_loop().create_task(serving)

    async def stop(self, grace: float | None) -> None:
        """Takes no new connection; answers that are not over after ``grace`` seconds end."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._task is None:
            self._socket.close()
            return
        self._server.config.timeout_graceful_shutdown = grace or _LEAST_GRACE_S  # type: ignore[assignment]
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


def _bind(host: str, port: int) -> tuple[socket.socket, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bracketed = f"[{host}]" if ":" in host else host
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {bracketed}:{port}: {error}") from error
    return bound, f"{bracketed}:{bound.getsockname()[1]}"


def _bind_path(path: Path) -> tuple[socket.socket, str]:
    claim(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigurationError(f"cannot listen on {path}: {error}") from error
    return bound, address_of(path)
