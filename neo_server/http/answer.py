"""From outputs to an HTTP answer: one JSON body, or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from neo_server.choices import Choices
from neo_server.errors import NeoError
from neo_server.http.errors import form_of
from neo_server.http.forms import CompletionForm, usage_of
from neo_server.request import Output, joined
from neo_server.tasks import race

_GONE = 499  # nobody reads it: the client closed the connection


class EventStream(StreamingResponse):
    """Server-sent events. A client that goes away ends its requests, wherever they are."""

    def __init__(self, events: AsyncIterator[bytes], choices: Choices) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``StreamingResponse``; the events may never have been asked for."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.release()


def stream(choices: Choices, form: CompletionForm, *, include_usage: bool) -> EventStream:
    """Chunks as they come; then ``[DONE]``."""
    return EventStream(_events(choices, form, include_usage), choices)


async def whole(request: Request, choices: Choices, form: CompletionForm) -> Response:
    """The answer when all choices have ended; they end early when the client goes away."""
    parts: list[list[Output]] = [[] for _ in choices.served]

    async def collect() -> None:
        async for index, output in choices.outputs():
            parts[index].append(output)

    try:
        await race(collect(), _disconnected(request))
    finally:
        choices.release()
    outputs = [joined(part) for part in parts]
    if any(output.finish is None for output in outputs):
        return Response(status_code=_GONE)
    return JSONResponse(form.answer(outputs, usage_of(choices.served)))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    choices: Choices, form: CompletionForm, include_usage: bool
) -> AsyncIterator[bytes]:
    """An error in mid-stream is an event of its own, since the status is sent already."""
    more: dict[str, Any] = {"usage": None} if include_usage else {}
    openings = [form.opening(index) for index in range(len(choices.served))]
    for opening in filter(None, openings):
        yield _event(form.part([opening]) | more)
    try:
        async for index, output in choices.outputs():
            if form.shows(output):
                yield _event(form.part([form.delta(index, output)]) | more)
        if include_usage:
            yield _event(form.part([]) | {"usage": usage_of(choices.served)})
    except NeoError as error:
        yield _event(form_of(error)[1])
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(data)
