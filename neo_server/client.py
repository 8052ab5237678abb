"""``Client`` and ``AsyncClient``: a server that runs, for other programs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from neo_server.errors import from_status
from neo_server.outputs import Collector, Delta, RequestOutput, deltas_of, whole_of
from neo_server.params import Prompt, SamplingParams, request_of
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

DEFAULT_SERVER = "127.0.0.1:50051"
_OPTIONS = (("grpc.max_receive_message_length", -1),)  # an answer may be long; the server's is not


@contextmanager
def _typed() -> Iterator[None]:
    """GRPC's status as an error of ours."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = grpc.StatusCode.UNKNOWN, str(error)
        if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            code, details = error.code(), error.details() or ""
        raise from_status(code, details) from error


class _Settings:
    """What both clients are given."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """``server``: HOST:PORT, or another gRPC target. Nothing is sent before the first call.

        ``timeout_s``: of each call, from its beginning to its end; the server ends what is not
        over then. ``credentials``: for TLS.
        """
        metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._given: dict[str, Any] = {"metadata": metadata, "timeout": timeout_s}
        self._open(server, credentials)

    def _open(self, server: str, credentials: grpc.ChannelCredentials | None) -> None:
        raise NotImplementedError


class Client(_Settings):
    """A server's gRPC API. Every method raises ``NeoError``: its class says what went wrong.

    ::

        with Client("localhost:50051") as client:
            for delta in client.stream("The capital of France is"):
                print(delta.text, end="")
    """

    def _open(self, server: str, credentials: grpc.ChannelCredentials | None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(server, _OPTIONS)
        else:
            self._channel = grpc.secure_channel(server, credentials, _OPTIONS)
        self._stub = rpc.InferenceStub(self._channel)

    def close(self) -> None:
        """Ends what runs."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> RequestOutput:
        """The whole answer to a text, token ids, or a conversation."""
        collector = Collector()
        with closing(self._messages(request_of(prompt, params, request_id))) as messages:
            for message in messages:
                collector.add(message)
        return collector.whole()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> Generator[Delta]:
        """The answer as it comes. Closing the iterator ends the request."""
        collector = Collector()
        with closing(self._messages(request_of(prompt, params, request_id))) as messages:
            for message in messages:
                if (delta := collector.add(message)) is not None:
                    yield delta

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; an unknown id is no error."""
        self._call("Abort", pb.AbortRequest(request_id=request_id))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, as the prompt of a request has them."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call("Tokenize", request).token_ids)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the whole."""
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        return str(self._call("Detokenize", request).text)

    def loads(self) -> pb.GetLoadsResponse:
        """Queue lengths, cache occupation, counters."""
        reply: pb.GetLoadsResponse = self._call("GetLoads", pb.GetLoadsRequest())
        return reply

    def server_info(self) -> pb.GetServerInfoResponse:
        """Configuration and workers."""
        reply: pb.GetServerInfoResponse = self._call("GetServerInfo", pb.GetServerInfoRequest())
        return reply

    def model_info(self) -> pb.GetModelInfoResponse:
        """What a client has to know of the model."""
        reply: pb.GetModelInfoResponse = self._call("GetModelInfo", pb.GetModelInfoRequest())
        return reply

    def _messages(self, request: pb.GenerateRequest) -> Generator[pb.GenerateResponse]:
        call = self._stub.Generate(request, **self._given)
        try:
            with _typed():
                yield from call
        finally:
            call.cancel()

    def _call(self, name: str, request: Any) -> Any:
        with _typed():
            return getattr(self._stub, name)(request, **self._given)


class AsyncClient(_Settings):
    """``Client`` for asyncio; made and used in one event loop."""

    def _open(self, server: str, credentials: grpc.ChannelCredentials | None) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(server, _OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(server, credentials, _OPTIONS)
        self._stub: Any = rpc.InferenceStub(self._channel)

    async def close(self) -> None:
        """Ends what runs."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> RequestOutput:
        """See ``Client``."""
        return await whole_of(self._messages(request_of(prompt, params, request_id)))

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> AsyncGenerator[Delta]:
        """See ``Client``."""
        async with aclosing(
            deltas_of(self._messages(request_of(prompt, params, request_id)))
        ) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """See ``Client``."""
        await self._call("Abort", pb.AbortRequest(request_id=request_id))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See ``Client``."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call("Tokenize", request)).token_ids)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See ``Client``."""
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call("Detokenize", request)).text)

    async def loads(self) -> pb.GetLoadsResponse:
        """See ``Client``."""
        reply: pb.GetLoadsResponse = await self._call("GetLoads", pb.GetLoadsRequest())
        return reply

    async def server_info(self) -> pb.GetServerInfoResponse:
        """See ``Client``."""
        request = pb.GetServerInfoRequest()
        reply: pb.GetServerInfoResponse = await self._call("GetServerInfo", request)
        return reply

    async def model_info(self) -> pb.GetModelInfoResponse:
        """See ``Client``."""
        reply: pb.GetModelInfoResponse = await self._call("GetModelInfo", pb.GetModelInfoRequest())
        return reply

    async def _messages(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse]:
        call = self._stub.Generate(request, **self._given)
        try:
            with _typed():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def _call(self, name: str, request: Any) -> Any:
        with _typed():
            return await getattr(self._stub, name)(request, **self._given)
