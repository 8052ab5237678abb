"""Builds the CUDA path: buffers, cache, pinned segments, kernels, graphs."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from gpu_worker.backends import Backend, Parts, modes_run, span_threads
from gpu_worker.cuda.buckets import MIXED_ROWS, Shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.exchange import DeviceExchange, device_segments
from gpu_worker.cuda.executor import CudaExecutor
from gpu_worker.cuda.graph_memory import graph_bytes
from gpu_worker.cuda.graphs import Graphs, buckets_of
from gpu_worker.cuda.pinning import pin_or_do_without
from gpu_worker.cuda.plan import CpuChunk
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.profiler import CudaProfiler
from gpu_worker.cuda.stages import Stages
from gpu_worker.errors import DeviceError
from gpu_worker.kv_pool import GpuCache, num_gpu_blocks
from gpu_worker.plan_check import PlanLimits

logger = logging.getLogger(__name__)

# Bytes kept free for what libraries load and sampling allocates later. Not measured: about what a
# reserve of 1 GiB for all left beside the graphs that it was made for (278 MiB on an H200).
LATER_RESERVE = 768 << 20


def make_cuda_backend(parts: Parts) -> Backend:
    """Everything allocated, loaded and captured: plans allocate nothing that lasts."""
    config, model = parts.config, parts.model
    device = model.device
    torch.cuda.set_device(device)
    sequences = parts.sequences()
    pinned = None
    if config.offloads:
        pinned = pin_or_do_without(device_segments(parts.segments), config, device)
    offloads = pinned is not None
    trial = _limits(parts, 1, offloads)
    layout = HostPlanReader(sequences, trial).layout
    buffers = Buffers(model.config, trial, layout, model.dtype, device, two_batches=offloads)
    if offloads:
        buffers.stage_for(model.config, parts.longest)
    modes = modes_run(trial.ride_groups > 0, offloads)
    captures = set() if config.worker.enforce_eager else {*modes} & {*config.scheduler.plan_modes}
    graphs_take = graph_bytes(
        buckets_of(buffers, trial.max_rows, trial.max_tokens).keys(captures),
        model.config.num_hidden_layers,
    )
    blocks = num_gpu_blocks(
        model.config,
        config.cache,
        config.scheduler,
        model.dtype.itemsize,
        device,
        activations=_transient_bytes(parts, buffers) + graphs_take + LATER_RESERVE,
    )
    cache = GpuCache(model.config, blocks, config.cache.block_size, model.dtype, device)
    logger.info(
        "GPU-cache: %d blocks of %d tokens, %.2f GiB", blocks, config.cache.block_size,
        cache.blocks.numel() * cache.blocks.element_size() / 2**30,
    )  # fmt: skip
    reader = HostPlanReader(sequences, _limits(parts, blocks, offloads))
    native = parts.exchange()
    exchange = None
    if offloads:
        timeout = config.worker.cpu_attn_timeout_s
        exchange = DeviceExchange(
            native, parts.segments, reader, model.dtype, timeout, device, pinned
        )
    stages = Stages(model, cache, buffers, exchange, config.scheduler.max_model_len)
    with torch.inference_mode():
        _warm_up(stages, trial.max_tokens)
        graphs = None
        if not config.worker.enforce_eager:
            graphs = Graphs(stages, trial.max_rows, trial.max_tokens)
            graphs.capture(captures)
    runner = CudaExecutor(
        stages,
        cache,
        reader.layout,
        graphs,
        depth=int(parts.segments.geometry["n_plans"]),
        keep_waiting=parts.keep_waiting,
        features=parts.features(),
    )
    profiler = CudaProfiler(
        model,
        cache,
        parts.offload(native, sequences, span_threads(config.worker)),
        config.scheduler.max_num_batched_tokens,
        parts.max_rows,
        parts.longest,
    )
    profiler.use(stages, native)
    return Backend(reader, runner, profiler, blocks, modes)


def _limits(parts: Parts, num_blocks: int, offloads: bool) -> PlanLimits:
    """Of a plan. No riders where nothing is offloaded."""
    limits = parts.limits(num_blocks)
    return limits if offloads else replace(limits, ride_groups=0, ride_capacity=0)


def _transient_bytes(parts: Parts, buffers: Buffers) -> int:
    """What a full iteration allocates beside the buffers, measured on a cache of one block."""
    config, model = parts.config, parts.model
    cache = GpuCache(model.config, 1, config.cache.block_size, model.dtype, model.device)
    stages = Stages(model, cache, buffers, None, config.scheduler.max_model_len)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        _warm_up(stages, config.scheduler.max_num_batched_tokens)
    peak = torch.cuda.max_memory_allocated() - before
    del stages, cache
    torch.cuda.empty_cache()
    logger.info("an iteration allocates %.0f MiB beside its buffers", peak / 2**20)
    return peak


def _warm_up(stages: Stages, max_tokens: int) -> None:
    """Loads and compiles every kernel: rows that do not exist touch no cache."""
    try:
        for channel in range(len(stages.buffers.channels)):
            offloads = stages.exchange is not None
            for tokens in {1, max_tokens}:
                stages.forward([Shape(channel, tokens, 0, 0, offloads, 1, 1)])
                decodes = Shape(channel, tokens, 1, int(offloads), offloads, 0, 1)
                stages.forward([decodes])
                if stages.buffers.rides is not None and offloads:
                    stages.forward([decodes.with_riders(stages.buffers.rides.layout.capacity)])
        for rows in range(1, stages.buffers.rows + 1):  # each number has its way to split them
            stages.decode_attention(Shape(0, rows, rows), stages.cache.blocks[0])
        mixed = [Shape(0, rows + 1, rows, tiles=1, sampled=1) for rows, _ in MIXED_ROWS]
        for shape in mixed:
            stages.attend(shape, 0)
        if stages.exchange is not None:
            chunk = CpuChunk(slot=0, start=1, tile_first=0)
            stages.forward([Shape(0, 1, 0, 0, True, 1, 1, (chunk,))])
            for shape in mixed:
                stages.forward([replace(shape, to_cpu=True, cpu_chunks=(chunk,))])
            stages.exchange.warm_up(stages.cache.blocks, stages.buffers.staging)
        torch.cuda.synchronize()
    except Exception as error:
        raise DeviceError(f"the kernels do not run on this device: {error}") from error
