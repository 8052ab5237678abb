"""The public gRPC service. Thin: checks, submits, streams; see protos/inference.proto."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc

from neo_server import __version__
from neo_server.choices import Choices
from neo_server.errors import NeoError, to_status
from neo_server.frontend import Frontend
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
            await _stream(choices, context)
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
        state = self._state
        config = state.resolved.config
        engine = state.engine
        info = pb.GetServerInfoResponse(
            version=__version__,
            instance_id=state.memory.location.instance_id,
            scheduling_policy=config.scheduler.scheduling_policy,
            device=state.gpu.device or config.worker.device,
            uptime_s=time.monotonic() - state.started,
            max_model_len=config.scheduler.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            block_size=config.cache.block_size,
            num_gpu_blocks=state.gpu.num_gpu_blocks,
            cpu_kv_page_size=config.cache.cpu_kv_page_size,
            num_cpu_pages=engine.scheduler.blocks.pages.total if engine else 0,
        )
        if state.gpu.is_ready:
            info.workers.add(kind=pb.WorkerInfo.KIND_GPU, row=0, pid=state.gpu.pid)
        for entry in state.memory.workers():
            info.workers.add(
                kind=pb.WorkerInfo.KIND_CPU_ATTN,
                row=entry.row,
                pid=entry.pid,
                num_threads=entry.num_threads,
                tasks=entry.tasks,
                busy_s=entry.busy_s,
                kv_bytes_read=entry.kv_bytes_read,
            )
        return info

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What a client has to know of the model."""
        model = self._state.resolved.model
        info = pb.GetModelInfoResponse(
            model=self._state.model_name,
            architecture=model.architecture,
            dtype=self._state.resolved.config.worker.dtype.value,
            vocab_size=model.vocab_size,
            max_model_len=self._state.resolved.config.scheduler.max_model_len,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=self._state.chat_template is not None,
        )
        if model.bos_token_id is not None:
            info.bos_token_id = model.bos_token_id
        return info

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        """Queue lengths, cache occupation, counters."""
        if self._state.engine is None:
            return pb.GetLoadsResponse()
        scheduler = self._state.engine.scheduler
        metrics, blocks = scheduler.metrics, scheduler.blocks
        return pb.GetLoadsResponse(
            num_running_reqs=len(scheduler.running),
            num_waiting_reqs=len(scheduler.waiting),
            num_used_gpu_blocks=blocks.blocks.used,
            num_total_gpu_blocks=blocks.blocks.total,
            num_used_cpu_pages=blocks.pages.used,
            num_total_cpu_pages=blocks.pages.total,
            gen_throughput=self._state.engine.throughput.rate(),
            iterations=metrics.iterations,
            num_gpu_decodes=metrics.num_gpu_decodes,
            num_cpu_decodes=metrics.num_cpu_decodes,
            num_preemptions=metrics.num_preemptions,
            num_swap_outs=metrics.num_swap_outs,
            num_swap_ins=metrics.num_swap_ins,
            num_output_tokens=metrics.num_output_tokens,
            num_voided_rows=metrics.num_voided_rows,
            num_wasted_rows=metrics.num_wasted_rows,
            max_skipped_iterations=metrics.max_skipped,
            cost_corrections=scheduler.cost.factors,
            median_prediction_error=scheduler.cost.median_error,
        )


async def _stream(choices: Choices, context: Context) -> None:
    first = choices.served[0]
    prompt_info = pb.PromptInfo(num_prompt_tokens=first.sequence.num_prompt)
    await context.write(pb.GenerateResponse(request_id=first.request_id, prompt_info=prompt_info))
    async for index, output in choices.outputs():
        for response in _responses(choices.served[index], output):
            await context.write(response)


def _responses(served: Request, output: Output) -> Iterator[pb.GenerateResponse]:
    id_, index = served.request_id, served.index
    if output.prompt_logprobs:
        told = pb.PromptLogprobs(tokens=map(_logprobs_of, output.prompt_logprobs))
        yield pb.GenerateResponse(request_id=id_, index=index, prompt_logprobs=told)
    if output.text or output.token_ids:
        delta = pb.Delta(text=output.text, token_ids=output.token_ids)
        if output.logprobs:
            delta.logprobs.extend(map(_logprobs_of, output.logprobs))
        yield pb.GenerateResponse(request_id=id_, index=index, delta=delta)
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
