"""What ``neo.v1.Inference`` tells of the server, the model and the load."""

from __future__ import annotations

import os
import time

from neo_server import __version__
from neo_server.engine import Engine
from neo_server.geometry import cpu_page_bytes
from neo_server.loads import concurrency, loads_of
from neo_server.service_names import SERVICES
from neo_server.state import ServerState
from protos import inference_pb2 as pb

MODEL_TYPE = "llama"  # the only one that protos/model_config.py accepts


def server_info(state: ServerState) -> pb.GetServerInfoResponse:
    """Configuration and workers; what only an engine knows is 0 before there is one."""
    config, options = state.resolved.config, state.options
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
        status=state.trouble(),
        services=SERVICES,
        http_address=state.http_address,
        uses_tls=options.ssl_certfile is not None,
        requires_api_key=options.api_key is not None,
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=options.max_num_queued_tokens,
        kv_cache_dtype=config.worker.dtype.value,
        cpu_kv_cache_dtype=config.cache.cpu_kv_cache_dtype.resolve(config.worker.dtype).value,
        pid=os.getpid(),
    )
    if state.engine is not None:
        scheduler = state.engine.scheduler
        held = concurrency(scheduler.blocks, scheduler.policy.places, info.max_model_len)
        info.num_cpu_pages = scheduler.blocks.pages.total
        info.max_tokens_per_request = scheduler.max_tokens_per_sequence
        info.max_concurrency = sum(held)
    info.workers.extend(_workers(state))
    return info


def _workers(state: ServerState) -> list[pb.WorkerInfo]:
    workers = []
    if state.gpu.is_ready:
        busy_s = state.engine.scheduler.metrics.device_s if state.engine else 0.0
        workers.append(
            pb.WorkerInfo(kind=pb.WorkerInfo.KIND_GPU, row=0, pid=state.gpu.pid, busy_s=busy_s)
        )
    for entry in state.memory.workers():
        workers.append(
            pb.WorkerInfo(
                kind=pb.WorkerInfo.KIND_CPU_ATTN,
                row=entry.row,
                pid=entry.pid,
                num_threads=entry.num_threads,
                tasks=entry.tasks,
                busy_s=entry.busy_s,
                kv_bytes_read=entry.kv_bytes_read,
            )
        )
    return workers


def model_info(state: ServerState) -> pb.GetModelInfoResponse:
    """What a client has to know of the model."""
    model, config = state.resolved.model, state.resolved.config
    page_bytes = cpu_page_bytes(config.cache, model, config.worker.dtype)
    return pb.GetModelInfoResponse(
        model=state.model_name,
        architecture=model.architecture,
        dtype=config.worker.dtype.value,
        vocab_size=model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        has_chat_template=state.chat_template is not None,
        model_path=config.model_path,
        model_type=MODEL_TYPE,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        has_tokenizer=state.resolved.has_tokenizer,
        kv_bytes_per_token=model.kv_bytes_per_token(config.worker.dtype.itemsize),
        cpu_kv_bytes_per_token=page_bytes // config.cache.cpu_kv_page_size,
    )


def loads(state: ServerState) -> pb.GetLoadsResponse:
    """Queue lengths, cache occupation, counters; sizes only, before there is an engine."""
    config = state.resolved.config
    reply = pb.GetLoadsResponse(
        max_model_len=config.scheduler.max_model_len,
        max_running_reqs=config.scheduler.max_num_seqs,
        block_size=config.cache.block_size,
        cpu_kv_page_size=config.cache.cpu_kv_page_size,
    )
    if state.engine is None:
        return reply
    now, blocks = loads_of(state.engine), state.engine.scheduler.blocks
    reply.num_running_reqs = now.running
    reply.num_waiting_reqs = now.waiting
    reply.num_cpu_reqs = now.running_on_cpu
    reply.num_waiting_tokens = now.waiting_tokens
    reply.num_used_gpu_blocks = blocks.blocks.used
    reply.num_total_gpu_blocks = blocks.blocks.total
    reply.num_used_cpu_pages = blocks.pages.used
    reply.num_total_cpu_pages = blocks.pages.total
    reply.num_used_tokens = now.gpu.used
    reply.max_total_num_tokens = now.gpu.total
    reply.token_usage = now.gpu.share
    reply.num_used_cpu_tokens = now.cpu.used
    reply.max_total_num_cpu_tokens = now.cpu.total
    reply.cpu_token_usage = now.cpu.share
    reply.num_cpu_attn_workers = state.memory.cpu_pool.live_workers()
    reply.MergeFrom(_counters(state.engine))
    return reply


def _counters(engine: Engine) -> pb.GetLoadsResponse:
    """Totals since the server became ready, and what the cost model has learned."""
    metrics, cost = engine.scheduler.metrics, engine.scheduler.cost
    return pb.GetLoadsResponse(
        gen_throughput=engine.throughput.rate(),
        iterations=metrics.iterations,
        num_gpu_decodes=metrics.num_gpu_decodes,
        num_cpu_decodes=metrics.num_cpu_decodes,
        num_preemptions=metrics.num_preemptions,
        num_swap_outs=metrics.num_swap_outs,
        num_swap_ins=metrics.num_swap_ins,
        num_output_tokens=metrics.num_output_tokens,
        num_prompt_tokens=engine.latencies.num_prompt_tokens,
        num_voided_rows=metrics.num_voided_rows,
        num_wasted_rows=metrics.num_wasted_rows,
        max_skipped_iterations=metrics.max_skipped,
        cost_corrections=cost.factors,
        median_prediction_error=cost.median_error,
    )
