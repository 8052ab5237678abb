"""The public gRPC service. Thin: checks, submits, streams; see protos/inference.proto."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from neo_server.choices import Choices
from neo_server.errors import NeoError, to_status
from neo_server.frontend import Frontend
from neo_server.info import loads, model_info, server_info
from neo_server.request import Finish, Output, Request
from neo_server.sampling import TokenLogprobs
from neo_server.state import ServerState
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(rpc.InferenceServicer):
    """``neo.v1.Inference``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._frontend = Frontend(state)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Streams one request. However the call ends, both caches are freed."""
        try:
            choices = await Choices.submit(self._frontend, [request])
        except NeoError as error:
            await _refuse(context, error)
        try:
            await context.write(_opening(choices))
            async with aclosing(choices.outputs()) as outputs:  # without a generator between
                async for index, output in outputs:
                    for message in _responses(choices.served[index], output):
                        await context.write(message)
        except NeoError as error:
            await _refuse(context, error)
        finally:
            choices.release()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Idempotent."""
        if self._state.engine is not None:
            index = request.index if request.HasField("index") else None
            self._state.engine.abort(request.request_id, index)
        return pb.AbortResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """As the prompt of a request would be, unless without special tokens."""
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        try:
            ids = await self._frontend.encode(request.text, add_special_tokens=special)
        except NeoError as error:
            await _refuse(context, error)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """The text of the whole."""
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        try:
            text = await self._frontend.decode(list(request.token_ids), skip_special_tokens=skip)
        except NeoError as error:
            await _refuse(context, error)
        return pb.DetokenizeResponse(text=text)

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Configuration and workers."""
        return server_info(self._state)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What a client has to know of the model."""
        return model_info(self._state)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        """Queue lengths, cache occupation, counters."""
        return loads(self._state)


async def responses(choices: Choices) -> AsyncGenerator[pb.GenerateResponse]:
    """What ``Generate`` sends; a slow reader gets fewer, larger deltas. Raises ``NeoError``."""
    yield _opening(choices)
    async with aclosing(choices.outputs()) as outputs:
        async for index, output in outputs:
            for response in _responses(choices.served[index], output):
                yield response


def _opening(choices: Choices) -> pb.GenerateResponse:
    first = choices.served[0]
    prompt_info = pb.PromptInfo(num_prompt_tokens=first.sequence.num_prompt)
    return pb.GenerateResponse(request_id=first.request_id, prompt_info=prompt_info)


def _responses(served: Request, output: Output) -> Iterator[pb.GenerateResponse]:
    id_, index = served.request_id, served.index
    if output.prompt_logprobs:
        told = pb.PromptLogprobs(tokens=map(_logprobs_of, output.prompt_logprobs))
        yield pb.GenerateResponse(request_id=id_, index=index, prompt_logprobs=told)
    if output.text or output.token_ids:
        response = pb.GenerateResponse(request_id=id_, index=index)
        delta = response.delta  # filled in place: a Delta of its own would be copied
        delta.text = output.text
        delta.token_ids.extend(output.token_ids)
        if output.logprobs:
            delta.logprobs.extend(map(_logprobs_of, output.logprobs))
        yield response
    if output.finish is not None:
        finish_info = _finish_info(served, output.finish)
        yield pb.GenerateResponse(request_id=id_, index=index, finish_info=finish_info)


def _logprobs_of(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token, logprob=own) for token, own in entry.top]
    return pb.TokenLogprobs(
        token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, top=top
    )


def _finish_info(served: Request, finish: Finish) -> pb.FinishInfo:
    sequence = served.sequence
    info = pb.FinishInfo(
        reason=finish.reason.name_in_proto,
        num_prompt_tokens=sequence.num_prompt,
        num_output_tokens=sequence.num_output,
        num_gpu_decodes=sequence.num_gpu_decodes,
        num_cpu_decodes=sequence.num_cpu_decodes,
        num_preemptions=sequence.num_preemptions,
    )
    if finish.stop_token_id is not None:
        info.stop_token_id = finish.stop_token_id
    elif finish.stop_str is not None:
        info.stop_str = finish.stop_str
    return info


async def _refuse(context: Context, error: NeoError) -> NoReturn:
    code, message = to_status(error)
    await context.abort(code, message)
    raise AssertionError("abort returned")
