"""The service that the smg gateway drives; see protos/vllm_engine.proto. Tokens in, tokens out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import grpc

from neo_server import __version__
from neo_server.choices import Choices
from neo_server.errors import NeoError, to_status
from neo_server.frontend import Frontend
from neo_server.info import MODEL_TYPE
from neo_server.loads import CacheUse, loads_of
from neo_server.request import Output, joined
from neo_server.state import ServerState
from neo_server.tokenizer_bundle import Bundle, bundle
from neo_server.vllm_request import generate_request
from neo_server.vllm_response import chunk_of, complete_of
from protos import smg_common_pb2 as common
from protos import vllm_engine_pb2 as pb
from protos import vllm_engine_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]
_CHUNK = 1 << 16  # bytes of a tokenizer's archive in one message


class VllmEngineService(rpc.VllmEngineServicer):
    """``vllm.grpc.engine.VllmEngine``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._frontend = Frontend(state)
        self._received = 0.0  # the last Generate
        self._bundle: Bundle | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """However the call ends, both caches are freed."""
        self._received = time.time()
        try:
            choices = await Choices.submit(self._frontend, [generate_request(request)])
        except NeoError as error:
            await _refuse(context, error)
        try:
            async for response in self._answer(request, choices):
                await context.write(response)
        except NeoError as error:
            await _refuse(context, error)
        finally:
            choices.release()

    async def _answer(
        self, request: pb.GenerateRequest, choices: Choices
    ) -> AsyncIterator[pb.GenerateResponse]:
        """With ``n`` completions their chunks and ends come as they are made."""
        asked = request.sampling_params.stop_token_ids
        own_ends = set(self._state.resolved.model.eos_token_ids).difference(asked)
        collected: list[list[Output]] = [[] for _ in choices.served]
        async for at, output in choices.outputs():
            served = choices.served[at]
            if request.stream:
                if output.token_ids:
                    yield chunk_of(served, output)
            else:
                collected[at].append(output)
            if output.finish is not None:
                whole = output._replace(prompt_logprobs=()) if request.stream else None
                yield complete_of(served, whole or joined(collected[at]), own_ends)

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """As grpc.health.v1, with the reason."""
        trouble = self._state.trouble()
        return pb.HealthCheckResponse(healthy=not trouble, message=trouble or "serving")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Idempotent."""
        if self._state.engine is not None:
            for request_id in request.request_ids:
                self._state.engine.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What a gateway has to know of the model."""
        state = self._state
        model, config, engine = state.resolved.model, state.resolved.config, state.engine
        limit = config.scheduler.max_model_len
        most = limit if engine is None else engine.scheduler.max_tokens_per_sequence
        return pb.GetModelInfoResponse(
            model_path=config.model_path,
            is_generation=True,
            max_context_length=limit,
            vocab_size=model.vocab_size,
            served_model_name=state.model_name,
            tokenizer_path=config.model_path if state.resolved.has_tokenizer else "",
            model_type=MODEL_TYPE,
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            max_req_input_len=most - 1,  # with one output token
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """One rank, no transfers of KV between engines."""
        engine = self._state.engine
        loads = None if engine is None else loads_of(engine)
        return pb.GetServerInfoResponse(
            active_requests=0 if loads is None else loads.running + loads.waiting,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._state.started,
            server_type="neo",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        """Of rank 0; another has none."""
        reply = pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1
        )
        if request.dp_rank == 0:
            reply.loads.append(self._load())
        return reply

    def _load(self) -> pb.SchedulerLoad:
        engine = self._state.engine
        most = self._state.resolved.config.scheduler.max_num_seqs
        if engine is None:
            return pb.SchedulerLoad(max_running_requests=most)
        loads = loads_of(engine)
        both = CacheUse(loads.gpu.used + loads.cpu.used, loads.gpu.total + loads.cpu.total)
        return pb.SchedulerLoad(
            num_running_reqs=loads.running,
            num_waiting_reqs=loads.waiting,
            num_total_reqs=loads.running + loads.waiting,
            num_used_tokens=_int32(both.used),
            max_total_num_tokens=_int32(both.total),
            token_usage=both.share,
            gen_throughput=engine.throughput.rate(),
            utilization=loads.running / most,
            max_running_requests=most,
        )

    async def GetTokenizer(  # noqa: N802
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        """FAILED_PRECONDITION where there is no tokenizer."""
        if not self._state.resolved.has_tokenizer:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "the server runs without a tokenizer"
            )
        if self._bundle is None:
            folder = Path(self._state.resolved.config.model_path)
            self._bundle = await asyncio.to_thread(bundle, folder)
        data = self._bundle.data
        for start in range(0, len(data), _CHUNK):
            is_last = start + _CHUNK >= len(data)
            yield common.GetTokenizerChunk(
                data=data[start : start + _CHUNK], sha256=self._bundle.sha256 if is_last else ""
            )


def _int32(value: int) -> int:
    return min(value, 2**31 - 1)


async def _refuse(context: Context, error: NeoError) -> NoReturn:
    code, message = to_status(error)
    await context.abort(code, message)
    raise AssertionError("abort returned")
