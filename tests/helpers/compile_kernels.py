"""Compiles every Triton launch of the CUDA path for a device that is not here; prints what came.

    python -m tests.helpers.compile_kernels --capability 90 --head-dim 128 ...

The launches are those of the warm-up, the graphs and plans themselves, on tensors without memory
(PyTorch's meta device), so that argument types, alignments and compile-time values are the real
ones. One JSON object a compiled kernel: when ("start", or "plans": too late), name, compile-time
values, bytes of shared memory, and what ptxas made of it (registers, stack bytes) where the wheel
brings the tools. A program of its own, since the tests' process has chosen Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import neo_native as native
from gpu_worker import ops
from gpu_worker.cuda import backend
from gpu_worker.cuda import exchange as exchange_module
from gpu_worker.cuda.buckets import Buckets, Shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.plan import CpuChunk, HostPlan
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.spans import HostSwap
from gpu_worker.cuda.stages import Stages
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel
from gpu_worker.plan_check import PlanLimits
from gpu_worker.weights import TORCH_DTYPES, empty_weights
from neo_native import SegmentKind, SwapKind, WireDType
from neo_native.segments import SegmentSet
from protos.config import PLAN_MODES, DType
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import make_geometry, make_segment

NOWHERE = torch.device("meta")
LEN, SLOTS, BLOCK, PAGE = 4096, 4, 16, 64
MAX_ROWS, MAX_TOKENS = 300, 2048
RIDERS = 8  # places of a group
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class AbsentDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    """Stands in for every launch: compiles, and remembers each kernel once."""

    def __init__(self, capability: int) -> None:
        triton.runtime.driver.set_active(AbsentDevice(capability))
        self.phase = "start"
        kernels: set[str] = set()
        launch = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            assert not warmup
            kernel = launch(function, *args, grid=grid, warmup=True, **kwargs)
            if kernel.hash not in kernels:
                kernels.add(kernel.hash)
                report(self.phase, function, kernel, kwargs)
            return kernel

        JITFunction.run = compile_only


def report(phase: str, function: Any, kernel: Any, kwargs: dict[str, Any]) -> None:
    """One line of output."""
    values = {name: value for name, value in kwargs.items() if isinstance(value, (int, bool))}
    print(
        json.dumps(
            {
                "phase": phase,
                "name": function.__name__,
                "values": values,
                "shared": kernel.metadata.shared,
            }
            | resources(kernel.asm["cubin"])
        ),
        flush=True,
    )


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack (what registers did not hold)."""
    if not CUOBJDUMP.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "stack": int(found[2])}


def unpinned(segment: native.Segment) -> Any:
    """In place of ``MappedSegment``: views without memory behind them."""

    def view(offset: int, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(segment.size, dtype=torch.uint8, device=NOWHERE)[offset:]
        return whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)

    return SimpleNamespace(view=view)


def make_stages(config: ModelConfig, dtype: DType, kv_code: int) -> Stages:
    """As the backend makes them."""
    geometry = make_geometry(
        config, dtype, block_size=BLOCK, page_size=PAGE, max_slots=SLOTS, n_pages=LEN // PAGE,
        max_blocks=LEN // BLOCK, max_pages=LEN // PAGE, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS,
        max_tasks=MAX_ROWS * config.num_key_value_heads * 2, kv_dtype=kv_code,
        ride_groups=config.num_hidden_layers + 1, ride_capacity=RIDERS,
    )  # fmt: skip
    kinds = {"sequences": SegmentKind.SEQUENCES, "work": SegmentKind.WORK,
             "exchange": SegmentKind.EXCHANGE, "cpu_cache": SegmentKind.CPU_CACHE}  # fmt: skip
    made = {name: make_segment(kind, geometry) for name, kind in kinds.items()}
    sequences = native.Sequences(made["sequences"], geometry)
    limits = PlanLimits.from_geometry(geometry, SLOTS * LEN // BLOCK, LEN, config.vocab_size)
    reader = HostPlanReader(sequences, limits)
    activations = TORCH_DTYPES[dtype]
    segments = cast(SegmentSet, SimpleNamespace(geometry=geometry, **made))
    exchange_module.MappedSegment = unpinned  # type: ignore[assignment, misc]
    exchange = DeviceExchange(
        cast(native.Exchange, None), segments, reader, activations, 1.0, NOWHERE
    )
    weights = empty_weights(config, activations, NOWHERE)
    model = LlamaModel(config, weights, ops.select(NOWHERE), LEN)
    cache = GpuCache(config, SLOTS * LEN // BLOCK, BLOCK, activations, NOWHERE)
    buffers = Buffers(config, limits, reader.layout, activations, NOWHERE, True)
    buffers.stage_for(config, LEN)
    return Stages(model, cache, buffers, exchange, LEN)


def start(stages: Stages) -> None:
    """What the backend launches before the first plan."""
    backend._warm_up(stages, MAX_TOKENS)
    for key in Buckets(MAX_ROWS, MAX_TOKENS, RIDERS).keys(PLAN_MODES):
        stages.forward(key)


def serve(stages: Stages, plans: int) -> None:
    """Plans without a graph, of random sizes: two sub-batches, later chunks, riders, swaps."""
    draw = np.random.default_rng(0)
    exchange = stages.exchange
    assert exchange is not None
    copies = exchange.copies(stages.cache.blocks, 2)
    for _ in range(plans):
        shapes = []
        for channel in range(int(draw.integers(1, 3))):
            gpu_rows, cpu_rows = (int(draw.integers(0, MAX_ROWS // 2)) for _ in range(2))
            new, tiles, first = (int(draw.integers(1, n)) for n in (MAX_TOKENS, 20, 20))
            later = (CpuChunk(0, int(draw.integers(1, LEN)), first + i) for i in range(2))
            chunks = tuple(later)[: int(draw.integers(0, 3))]
            shapes.append(
                Shape(channel, gpu_rows + cpu_rows + new, gpu_rows, cpu_rows,
                      bool(cpu_rows or chunks), first + 1 + tiles, gpu_rows + cpu_rows + 1, chunks)
            )  # fmt: skip
        if draw.random() < 0.5:
            shapes[0] = shapes[0].with_riders(RIDERS)
        stages.forward(shapes)
        n = int(draw.integers(1, LEN))
        blocks, pages = (np.zeros(-(-n // size), np.int32) for size in (BLOCK, PAGE))
        swaps = tuple(HostSwap(kind, 0, n, blocks, pages) for kind in (SwapKind.OUT, SwapKind.IN))
        no_rows = SimpleNamespace(swaps=swaps, batches=(), slots=np.empty(0, np.uint32))
        copies.start(cast(HostPlan, no_rows))
        copies.finish(cast(HostPlan, no_rows))


def main() -> None:
    """Compiles for one device, model shape and pair of dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, required=True)
    parser.add_argument("--dtype", type=DType, required=True)
    parser.add_argument("--int8", action="store_true", help="of the CPU-cache")
    for name in ("head-dim", "heads", "kv-heads", "hidden", "inner", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=3,  # a layer of 1 is a constant to Triton, one of 0 a multiple of 16
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=LEN,
        tie_word_embeddings=False,
        dtype=args.dtype,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    compiled = Compiled(args.capability)
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment, misc]
    kv_code = WireDType.INT8 if args.int8 else WireDType[args.dtype.name]
    with torch.inference_mode():
        stages = make_stages(config, args.dtype, kv_code)
        start(stages)
        compiled.phase = "plans"
        serve(stages, plans=20)


if __name__ == "__main__":
    main()
