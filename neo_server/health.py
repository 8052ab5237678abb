"""grpc.health.v1 of every public service, by what the server's parts say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

_log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between looks; what tells of itself that it changed is seen at once


class Health:
    """One status for the server, ``""``, and each of its services."""

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = HealthServicer()
        self._names = ("", *services)
        self._changed = asyncio.Event()
        self._draining = False
        self._before: str | None = None  # the trouble that was told last; None: nothing was

    async def open(self) -> None:
        """NOT_SERVING until ``watch``."""
        await self._set(False)

    def changed(self) -> None:
        """Something that matters to ``watch`` is new."""
        self._changed.set()

    async def watch(self, trouble: Callable[[], str]) -> None:
        """Follows ``trouble``, which says why nothing can be served; "": all is well."""
        while True:
            self._changed.clear()
            await self.look(trouble)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S)

    async def look(self, trouble: Callable[[], str]) -> None:
        """Once."""
        now, before = trouble(), self._before
        if now == before:
            return
        await self._set(not now)
        if not self._draining and (now or before):
            _log.warning("%s", f"NOT_SERVING: {now}" if now else "SERVING again")
        self._before = now

    async def drain(self) -> None:
        """NOT_SERVING for good; those that watch are told."""
        self._draining = True
        await self.servicer.enter_graceful_shutdown()

    async def _set(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if is_serving else status.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, value)
