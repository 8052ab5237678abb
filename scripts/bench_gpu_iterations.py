"""Times iterations of the gpu worker's CUDA path without a server.

Decode and prefill beside their rooflines, on random weights of a real model's shapes.

    python scripts/bench_gpu_iterations.py --shape Llama-3.1-8B --rows 1 32 128 --context 1024

What riders cost the rows beside them, per layer, with next to no work for the cpu workers:

    python scripts/bench_gpu_iterations.py --rows --riders 1 8 32 --ridden 24 --cpu-gib 2 \
        --threads 8 --enforce-eager

What a chunk of a prefill adds to 22 decodes, on the device and on the CPU (first chunk, later
ones), with and without the copy of what is earlier; prefill attention alone; then what copies reach
alone and beside the decodes, in several sizes. Captures what it needs itself:

    python scripts/bench_gpu_iterations.py --rows --chunks 128 256 512 --earlier 0 512 --cpu-gib 8 \
        --cpu-kv-cache-dtype int8 --copy-tokens 512 2048 --copy-programs 4 8 16 64 \
        --prefill-tiles 64,8,3 128,8,2 --enforce-eager
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

import neo_native as native
from gpu_worker import ops
from gpu_worker.backends import Parts, make_backend
from gpu_worker.cuda.chunk_trial import PLACES, ChunkTrial, Sweep
from gpu_worker.cuda.events import graph_seconds
from gpu_worker.cuda.profiler import CudaProfiler
from gpu_worker.executor import Outcome
from gpu_worker.model import LlamaModel
from gpu_worker.weights import TORCH_DTYPES, dummy_weights
from neo_native import RowKind
from neo_native.segments import SegmentSet
from neo_server.architectures import find, known
from neo_server.bench.device_rates import measure_rates
from neo_server.geometry import geometry_fields
from protos.config import CacheConfig, DType, EngineConfig, SchedulerConfig, WorkerConfig
from protos.model_config import ModelConfig

REPEATS = 10  # of a captured call
WARM_UP = 4  # iterations before those that are counted


def model_folder(shape: str, layers: int | None) -> Path:
    """A directory with the ``config.json`` of a named model, of fewer layers where asked."""
    found = find(shape)
    if found is None:
        raise SystemExit(f"--shape is {shape}; known are {', '.join(known())}")
    fields = json.loads((found / "config.json").read_text(encoding="utf-8"))
    fields["num_hidden_layers"] = layers or fields["num_hidden_layers"]
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def segment(kind: native.SegmentKind, geometry: Any) -> native.Segment:
    """One without a name."""
    fd = os.memfd_create("segment")
    try:
        return native.Segment.create(fd, kind, geometry)
    finally:
        os.close(fd)


class Bench:
    """One gpu worker's backend, fed by hand."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = model_folder(options.shape, options.layers)
        self.config = config = ModelConfig.from_pretrained(folder)
        dtype = DType.BFLOAT16
        blocks = options.blocks
        engine = EngineConfig(
            model_path=str(folder),
            cache=CacheConfig(
                num_gpu_blocks_override=blocks, kv_offloading_size=options.cpu_gib,
                cpu_kv_cache_dtype=options.cpu_kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                # As many rows as there are places for riders, so that all groups can be full.
                max_num_seqs=max(
                    256, max(options.riders, default=0) * (config.num_hidden_layers + 1)
                ),
                max_num_batched_tokens=options.max_tokens,
                max_model_len=options.max_len,
                ride_capacity=max(options.riders, default=0),
            ),
            worker=WorkerConfig(
                device="cuda", dtype=dtype, kernel_backend=options.backend, spin_us=200,
                enforce_eager=options.enforce_eager,
            ),
        )  # fmt: skip
        geometry = native.make_geometry(**geometry_fields(engine, config, 8))
        kinds = native.SegmentKind
        self.segments = SimpleNamespace(
            geometry=geometry,
            **{
                name.lower(): segment(getattr(kinds, name), geometry)
                for name in ("CONTROL", "WORK", "EXCHANGE", "CPU_CACHE", "SEQUENCES")
            },
        )
        self.control = native.Control(self.segments.control)
        device = torch.device("cuda", 0)
        begin = time.perf_counter()
        weights = dummy_weights(config, TORCH_DTYPES[dtype], device, 0)
        model = LlamaModel(config, weights, ops.select(device), options.max_len)
        torch.cuda.synchronize()
        print(f"weights {time.perf_counter() - begin:.1f} s", flush=True)
        self.workers: list[Any] = []
        if options.threads:
            s = self.segments
            worker = native.AttentionWorker(
                self.control, s.work, s.exchange, s.cpu_cache, s.sequences, 0, options.threads,
                list(range(2, 2 + options.threads)),
            )  # fmt: skip
            worker.start()
            self.workers.append(worker)
        segments = cast(SegmentSet, self.segments)  # all of it that a backend uses
        begin = time.perf_counter()
        parts = Parts(engine, model, segments, self.control, lambda: True)
        self.backend = make_backend(parts)
        print(f"backend {time.perf_counter() - begin:.1f} s", flush=True)
        sequences = parts.sequences()
        table, pages = sequences.block_table, sequences.page_table
        table[:] = np.random.default_rng(0).integers(0, blocks, table.shape)
        n_pages = int(geometry["n_pages"])
        pages[:] = np.arange(pages.size).reshape(pages.shape) % n_pages
        sequences.params["top_p"] = 1.0
        self.geometry = geometry
        self.plan_id = 0
        self.weight_bytes = (
            sum(
                w.numel() * w.element_size()
                for layer in weights.layers
                for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
            )
            + weights.head.numel() * weights.head.element_size()
        )

    def step(self, batches: list[list[tuple[int, RowKind, int, int]]]) -> Any:
        """``batches``: (slot, kind, start, n_new) each."""
        self.plan_id += 1
        rows = [row for batch in batches for row in batch]
        n_tokens = sum(row[3] for row in rows)
        step = SimpleNamespace(
            header=np.zeros((), native.step_header_dtype),
            rows=np.zeros(len(rows), native.step_row_dtype),
            swaps=np.zeros(0, native.swap_dtype),
            tokens=np.ones(n_tokens, np.int32),
        )
        at = 0
        for i, (slot, kind, start, n_new) in enumerate(rows):
            step.rows[i] = (slot, kind, start, n_new, at, 1, 0, 0)
            at += n_new
        step.header["plan_id"] = self.plan_id
        step.header["n_rows"][: len(batches)] = [len(batch) for batch in batches]
        step.header["n_tokens"] = n_tokens
        return step

    def time(
        self, batches: list[list[tuple[int, RowKind, int, int]]], n: int = 20
    ) -> dict[str, float]:
        """Milliseconds per iteration, two plans in flight: on the wall, on the device, waiting."""
        runner = self.backend.runner
        outcomes: list[Outcome] = []
        host: list[float] = []
        begin = 0.0
        for i in range(n + WARM_UP):
            if i == WARM_UP:
                while runner.pending:
                    runner.collect()
                outcomes.clear()
                begin = time.perf_counter()
            at = time.perf_counter()
            runner.submit(self.backend.reader.read(self.step(batches)))
            host.append(time.perf_counter() - at)
            if runner.full:
                outcomes.append(runner.collect())
        while runner.pending:
            outcomes.append(runner.collect())
        wall = (time.perf_counter() - begin) / n
        spans = [outcome.times.elapsed for outcome in outcomes]
        waits = [sum(outcome.times.cpu_wait) for outcome in outcomes]
        return {
            "wall_ms": wall * 1e3, "device_ms": median(spans) * 1e3,
            "host_ms": median(host[WARM_UP:]) * 1e3, "cpu_wait_ms": median(waits) * 1e3,
        }  # fmt: skip


def gemm_floor(bench: Bench, tokens: int) -> float:
    """Seconds of one iteration's matrix products alone, captured."""
    model = bench.backend.runner._stages.model  # type: ignore[attr-defined]
    c, w = model.config, model.weights
    x = torch.randn(tokens, c.hidden_size, dtype=model.dtype, device="cuda")
    y = torch.randn(tokens, c.intermediate_size, dtype=model.dtype, device="cuda")
    z = torch.randn(tokens, c.q_size, dtype=model.dtype, device="cuda")
    outs = [torch.mm(x, m.t()) for m in (w.layers[0].qkv, w.layers[0].gate_up, w.head)]
    down = torch.empty_like(x)

    def run() -> None:
        for layer in w.layers:
            torch.mm(x, layer.qkv.t(), out=outs[0])
            torch.mm(z, layer.o.t(), out=down)
            torch.mm(x, layer.gate_up.t(), out=outs[1])
            torch.mm(y, layer.down.t(), out=down)
        torch.mm(x, w.head.t(), out=outs[2])

    return graph_seconds(run, REPEATS)


@torch.inference_mode()
def ride_costs(bench: Bench, riders: int, rows: int, context: int) -> list[dict[str, Any]]:
    """Of groups with ``riders`` places, full and empty, as graphs run them and in line."""
    profiler = cast(CudaProfiler, bench.backend.profiler)
    stages = bench.backend.runner._stages  # type: ignore[attr-defined]
    layers, beside = bench.config.num_hidden_layers, stages.beside
    lines = []
    for stream, taken in ((beside, riders), (beside, 0), (None, riders), (None, 0)):
        stages.beside = stream
        run = profiler.riders(taken, riders, rows, context)
        found = [run() for _ in range(REPEATS)]
        added = sorted((f.riding - f.alone) / layers * 1e6 for f in found)
        lines.append(
            {
                "riders": taken, "places": riders, "rows": rows, "in_line": stream is None,
                "riding_ms": median(f.riding for f in found) * 1e3,
                "alone_ms": median(f.alone for f in found) * 1e3,
                "us_per_layer": median(added), "least_us": added[0], "most_us": added[-1],
                "waited_us_per_layer": median(f.waited for f in found) / layers * 1e6,
            }
        )  # fmt: skip
    stages.beside = beside
    return lines


@torch.inference_mode()
def chunk_costs(bench: Bench, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of chunks beside decodes, and of copies; see ``ChunkTrial``."""
    stages = bench.backend.runner._stages  # type: ignore[attr-defined]
    trial = ChunkTrial(
        stages,
        lambda rows: bench.backend.reader.read(bench.step([rows])),
        (int(bench.geometry["max_rows"]), options.max_tokens),
        options.decodes,
        options.context,
    )
    sweep = Sweep(
        tuple(options.copy_programs),
        tuple(options.copy_kib),
        tuple(options.copy_warps),
        tuple(options.prefill_tiles),
    )
    chunks = options.chunks, options.earlier, options.chunk_place
    if options.chunks:
        yield from trial.chunks(*chunks)
    if options.copy_tokens:
        yield from trial.copies(options.copy_tokens, sweep)
    if options.chunks and sweep != Sweep():
        yield from trial.chunks(*chunks, sweep)


def three(text: str) -> tuple[int, int, int]:
    """``64,4,3``."""
    a, b, c = map(int, text.split(","))
    return a, b, c


def options_given() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=known(), default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--cpu-rows", type=int, nargs="*", default=[])
    parser.add_argument("--cpu-context", type=int, default=256)
    parser.add_argument("--riders", type=int, nargs="*", default=[], help="places of a group")
    parser.add_argument("--ridden", type=int, nargs="*", default=[24], help="decodes beside them")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="new tokens of a chunk")
    parser.add_argument("--earlier", type=int, nargs="*", default=[0, 512], help="its earlier ones")
    parser.add_argument("--chunk-place", choices=PLACES, nargs="*", default=[*PLACES])
    parser.add_argument("--decodes", type=int, default=22, help="beside chunks and copies")
    parser.add_argument("--copy-tokens", type=int, nargs="*", default=[], help="of a copy")
    parser.add_argument("--copy-programs", type=int, nargs="*", default=[])
    parser.add_argument("--copy-kib", type=int, nargs="*", default=[], help="under way of each")
    parser.add_argument("--copy-warps", type=int, nargs="*", default=[])
    parser.add_argument(
        "--prefill-tiles", type=three, nargs="*", default=[], help="tokens a step,warps,stages"
    )
    parser.add_argument("--cpu-gib", type=float, default=0.0)
    parser.add_argument("--cpu-kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=16384)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--time-limit", type=int, default=300, help="seconds; then it is killed")
    return parser.parse_args()


def main() -> None:
    """Prints one JSON line per measurement."""
    options = options_given()
    signal.alarm(options.time_limit)
    rates = measure_rates("cuda", "bfloat16")
    bandwidth, rate = rates.bytes_per_s, rates.flops
    print(json.dumps({"copy_gb_per_s": bandwidth / 1e9, "matrix_tflops": rate / 1e12}), flush=True)
    bench = Bench(options)
    kv_token = bench.config.kv_bytes_per_token(2)
    for rows in options.rows:
        plan = [[(i, RowKind.DECODE_GPU, options.context, 1) for i in range(rows)]]
        found = bench.time(plan)
        roof = (bench.weight_bytes + rows * options.context * kv_token) / bandwidth * 1e3
        found |= {"roof_ms": roof, "ratio": found["device_ms"] / roof}
        if options.backend != "torch":
            found["gemms_ms"] = gemm_floor(bench, rows) * 1e3
        print(json.dumps({"decode": rows} | found), flush=True)
    for tokens in options.prefill:
        each = min(1024, tokens)
        plan = [[(i, RowKind.PREFILL_GPU, 0, each) for i in range(tokens // each)]]
        found = bench.time(plan, 6)
        roof = (
            2
            * (bench.weight_bytes / 2 - bench.config.vocab_size * bench.config.hidden_size)
            * tokens
            / rate
        )
        found |= {"roof_ms": roof * 1e3, "share": roof * 1e3 / found["device_ms"]}
        print(json.dumps({"prefill": tokens} | found), flush=True)
    for cpu in options.cpu_rows:
        rows = [(i, RowKind.DECODE_GPU, options.context, 1) for i in range(32)]
        mine = [(100 + i, RowKind.DECODE_CPU, options.cpu_context, 1) for i in range(cpu)]
        print(json.dumps({"merged": cpu} | bench.time([rows + mine])), flush=True)
        print(json.dumps({"two": cpu} | bench.time([rows, mine])), flush=True)
    for rows in options.ridden if options.riders else []:
        for riders in options.riders:
            for line in ride_costs(bench, riders, rows, options.context):
                print(json.dumps(line), flush=True)
    for line in chunk_costs(bench, options):
        print(json.dumps(line), flush=True)
    for worker in bench.workers:
        worker.stop()


if __name__ == "__main__":
    main()
