"""Servers that ``neo bench serve`` can send to: NEO's gRPC, and whatever speaks OpenAI's HTTP."""

from __future__ import annotations

import json
import logging
import ssl
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import httpx

from neo_server.bench.serve_jobs import Job
from neo_server.bench.serve_record import Record
from neo_server.client import AsyncClient
from neo_server.errors import NeoError, UnavailableError
from neo_server.params import SamplingParams
from protos.model_config import ModelConfig

_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_DATA = "data: "
_DONE = "[DONE]"


class Target(Protocol):
    """Used in one event loop, as a context."""

    model: str
    max_model_len: int
    vocab_size: int | None  # None: it does not say

    async def __aenter__(self) -> Self:
        """Asks the server for what it serves. Raises ``NeoError``."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the connections."""

    async def send(self, job: Job, record: Record, *, temperature: float, ignore_eos: bool) -> None:
        """Fills the record as the answer comes. Raises ``NeoError``."""


class GrpcTarget:
    """``neo.v1.Inference``."""

    def __init__(
        self,
        server: str,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._client = AsyncClient(server, api_key=api_key, credentials=credentials)
        self.model = ""
        self.max_model_len = 0
        self.vocab_size: int | None = None

    async def __aenter__(self) -> Self:
        info = await self._client.model_info()
        self.model, self.max_model_len = info.model, info.max_model_len
        self.vocab_size = info.vocab_size
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def send(self, job: Job, record: Record, *, temperature: float, ignore_eos: bool) -> None:
        """See ``Target``."""
        params = SamplingParams(
            temperature=temperature, max_tokens=job.max_tokens, ignore_eos=ignore_eos
        )
        record.begin = time.perf_counter()
        async for delta in self._client.stream(job.prompt, params):
            if delta.token_ids:
                record.times.append(time.perf_counter())
            if delta.finished is not None:
                record.num_prompt = delta.finished.num_prompt_tokens
                record.num_output = delta.finished.num_output_tokens
                record.num_gpu_decodes = delta.finished.num_gpu_decodes
                record.num_cpu_decodes = delta.finished.num_cpu_decodes


class HttpTarget:
    """``/v1/completions``, or ``/v1/chat/completions`` with the prompt as one user's message."""

    def __init__(
        self, base_url: str, api_key: str | None, ca_certs: Path | None, *, chat: bool
    ) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers=headers,
            timeout=None,
            limits=_NO_LIMITS,
            verify=True if ca_certs is None else ssl.create_default_context(cafile=ca_certs),
        )
        self._chat = chat
        self.model = ""
        self.max_model_len = 1 << 31
        self.vocab_size: int | None = None

    async def __aenter__(self) -> Self:
        try:
            reply = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            await self._client.aclose()
            raise UnavailableError(f"{self._client.base_url}: {error!r}") from error
        if reply.status_code != httpx.codes.OK:
            await self._client.aclose()
            raise NeoError(f"GET /v1/models: {_message(reply)}")
        found = reply.json()["data"][0]
        self.model = str(found["id"])
        self.max_model_len = int(found.get("max_model_len") or self.max_model_len)
        if (Path(self.model) / "config.json").exists():
            self.vocab_size = ModelConfig.from_pretrained(self.model).vocab_size
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def send(self, job: Job, record: Record, *, temperature: float, ignore_eos: bool) -> None:
        """See ``Target``."""
        path, body = self._body(job)
        body |= {"model": self.model, "temperature": temperature, "max_tokens": job.max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if ignore_eos:
            body["ignore_eos"] = True
        record.begin = time.perf_counter()
        try:
            async with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    await reply.aread()
                    raise NeoError(_message(reply))
                async for line in reply.aiter_lines():
                    if line.startswith(_DATA) and line[len(_DATA) :] != _DONE:
                        _note(json.loads(line[len(_DATA) :]), record)
        except httpx.HTTPError as error:
            raise UnavailableError(repr(error)) from error

    def _body(self, job: Job) -> tuple[str, dict[str, Any]]:
        if not self._chat:
            return "/v1/completions", {"prompt": job.prompt}
        turn = {"role": "user", "content": job.prompt}
        return "/v1/chat/completions", {"messages": [turn]}


def _note(event: dict[str, Any], record: Record) -> None:
    """One server-sent event. A chunk that only says how the request ended carries no token."""
    if "error" in event:
        raise NeoError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text or (choice.get("finish_reason") and not record.times):
            record.times.append(time.perf_counter())
    if (usage := event.get("usage")) is not None:
        record.num_prompt = usage["prompt_tokens"]
        record.num_output = usage["completion_tokens"]


def _message(reply: httpx.Response) -> str:
    """OpenAI's form of an error, or what else came."""
    try:
        return f"{reply.status_code}: {reply.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{reply.status_code}: {reply.text:.200}"
