"""Decode attention on the CPU against the machine's read bandwidth.

    python scripts/bench_cpu_attention.py --shape llama3-8b --dtype bfloat16 --threads 2 --workers 2

In one run, over one CPU-cache segment far larger than any cache: the read ceiling (the best of five
patterns), the kernel called by threads of this process, the same work through worker processes and
doorbells, and PyTorch's scaled_dot_product_attention over the same bytes, contiguous instead of
paged. Every repetition measures all of them next to each other; a fraction pairs a repetition with
its own ceiling, and the table gives medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import neo_native as nn
from neo_native import segments as sg

ROOT = Path(__file__).resolve().parents[1]
HEADER = 4096  # bytes before the first page of the CPU-cache
NONE = np.zeros(0, np.uint32)
DTYPES = {kind.name.lower(): kind for kind in nn.WireDType}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
# Warms code, threads and page tables: which worker first touches a page differs from run to run.
WARM_RUNS = 8
READY = 2  # WorkerState of a worker that claims tasks


@dataclass(frozen=True)
class Shape:
    """One model's attention and the context that its rows have."""

    n_heads: int
    n_kv_heads: int
    tokens: int
    head_dim: int = 128


SHAPES = {
    "llama3-8b": Shape(32, 8, 2048),
    "llama2-7b": Shape(32, 32, 1024),
    "llama3-70b": Shape(64, 8, 4096),
}


@dataclass
class Series:
    """One contender over the repetitions: GB/s of K and V read, and its ceiling's."""

    gb_per_s: list[float] = field(default_factory=list)
    fraction: list[float] = field(default_factory=list)

    def add(self, rate: float, ceiling: float) -> None:
        """One repetition, both in GB/s."""
        self.gb_per_s.append(rate)
        self.fraction.append(rate / ceiling)


class Bench:
    """The segments, filled, and each contender as a function that does the whole work once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.shape, self.dtype = SHAPES[args.shape], args.dtype
        self.threads, self.isa = args.threads, args.isa
        self.n_workers = args.workers
        s = self.shape
        pages_per_row = -(-s.tokens // args.page_size)
        act = "bfloat16" if self.dtype == "int8" else self.dtype
        token = s.head_dim * BYTES[self.dtype] + (4 if self.dtype == "int8" else 0)
        self.page_bytes = 2 * s.n_kv_heads * args.page_size * token
        self.n_rows = max(1, int(args.cache_gib * 2**30) // (self.page_bytes * pages_per_row))
        self.row_bytes = 2 * s.n_kv_heads * s.tokens * token
        self.geometry = nn.make_geometry(
            n_layers=1,
            n_heads=s.n_heads,
            n_kv_heads=s.n_kv_heads,
            head_dim=s.head_dim,
            act_dtype=DTYPES[act],
            kv_dtype=DTYPES[self.dtype],
            block_size=16,
            page_size=args.page_size,
            n_pages=self.n_rows * pages_per_row,
            max_slots=self.n_rows,
            max_rows=self.n_rows,
            max_tokens=self.n_rows,
            max_blocks=1,
            max_pages=pages_per_row,
            max_tasks=self.n_rows * s.n_kv_heads * 2,
            n_plans=2,
            max_workers=max(1, self.n_workers),
            lease_us=1_000_000,
            spin_us=200,
        )
        self.segments = sg.create_all(self.geometry, populate_threads=max(1, self.threads))
        self.sequences = nn.Sequences(self.segments.sequences, self.geometry)
        self.cache = nn.CpuCache(self.segments.cpu_cache, self.sequences, self.geometry)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.exchange: nn.Exchange | None = None
        rng = np.random.default_rng(0)
        pages = rng.permutation(self.n_rows * pages_per_row).astype(np.uint32)
        self.sequences.page_table[:, :pages_per_row] = pages.reshape(self.n_rows, -1)
        self.lens = np.full(self.n_rows, s.tokens, np.uint32)
        q = rng.standard_normal((self.n_rows, s.n_heads, s.head_dim)).astype(np.float32)
        self.q = encode(q, act)
        self.fill(rng, args.page_size)

    def memory(self) -> np.ndarray:
        """The cache's pages as bytes."""
        segment = self.segments.cpu_cache
        size = int(self.geometry["n_pages"]) * self.page_bytes
        buffer = (ctypes.c_uint8 * size).from_address(segment.address + HEADER)
        return np.frombuffer(buffer, np.uint8)

    def fill(self, rng: np.random.Generator, page_size: int) -> None:
        """Every page gets one of eight random pages: of the right distribution, at memcpy speed."""
        s = self.shape
        memory = self.memory().reshape(-1, self.page_bytes)
        templates = min(8, len(memory))
        for page in range(templates):
            rows = rng.standard_normal((2 * s.n_kv_heads, page_size, s.head_dim))
            memory[page] = self.tiles(rows.astype(np.float32))
        for page in range(templates, len(memory)):
            memory[page] = memory[page % templates]

    def tiles(self, rows: np.ndarray) -> np.ndarray:
        """[2 n_kv_heads, page_size, head_dim] to the bytes of one page."""
        if self.dtype != "int8":
            return encode(rows, self.dtype).reshape(-1).view(np.uint8)
        scale = np.abs(rows).max(axis=2) / np.float32(127)
        whole = np.rint(rows / scale[..., None]).astype(np.int8)
        parts = [whole.reshape(len(rows), -1).view(np.uint8), scale.view(np.uint8)]
        return np.concatenate(parts, axis=1).reshape(-1)

    def ceiling(self) -> tuple[str, float]:
        """Name and GB/s of the best read pattern."""
        rates = nn.read_ceiling(self.segments.cpu_cache, self.threads)
        name = max(rates, key=rates.__getitem__)
        return name, rates[name] / 1e9

    def kernel(self) -> None:
        """Rows dealt to `threads` threads; each call attends with a few rows, without the GIL."""
        starts = iter(range(0, self.n_rows, max(1, self.n_rows // (16 * self.threads))))
        step = max(1, self.n_rows // (16 * self.threads))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    at = next(starts, None)
                if at is None:
                    return
                rows = slice(at, min(at + step, self.n_rows))
                slots = np.arange(rows.start, rows.stop, dtype=np.uint32)
                nn.attend(self.q[rows], self.cache, 0, slots, self.lens[rows], self.isa)

        others = [threading.Thread(target=work) for _ in range(self.threads - 1)]
        for other in others:
            other.start()
        work()
        for other in others:
            other.join()

    def start_workers(self) -> None:
        """Real worker processes, `threads` threads over all of them."""
        location = self.segments.location
        control = nn.Control(self.segments.control)
        per_worker = max(1, self.threads // self.n_workers)
        code = (
            "from neo_native import segments; from cpu_attn_worker.worker import serve;"
            f"serve(segments.attach_all({location.instance_id!r}, shm_dir={location.shm_dir!r},"
            f"cpu_cache_writable=False), {per_worker}, '')"
        )
        path = os.pathsep.join(entry for entry in [str(ROOT), *sys.path] if entry)
        env = os.environ | {"PYTHONPATH": path}
        if self.isa != "auto":
            env["NEO_CPU_ISA"] = self.isa
        for _ in range(self.n_workers):
            self.processes.append(subprocess.Popen([sys.executable, "-c", code], env=env))
        end = time.monotonic() + 60
        while int((control.worker_rows()["state"] == READY).sum()) < self.n_workers:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.n_workers} workers were not ready within 60 s")
            time.sleep(0.05)
        self.exchange = nn.Exchange(
            control, self.segments.work, self.segments.exchange, self.geometry
        )

    def through_workers(self) -> None:
        """One plan of one layer through doorbells and task words."""
        if self.exchange is None:
            raise RuntimeError("start_workers comes first")
        slots = np.arange(self.n_rows, dtype=np.uint32)
        self.exchange.begin_plan(0, (slots, NONE), (self.lens, NONE))
        self.exchange.publish(0, 0, self.q)
        if not self.exchange.wait(0, 120.0):
            raise TimeoutError("the workers did not finish within 120 s")
        self.exchange.end_plan()

    def torch_attention(self) -> Callable[[], None] | None:
        """None for int8, which scaled_dot_product_attention does not take."""
        if self.dtype == "int8":
            return None
        import torch

        torch.set_num_threads(self.threads)
        s, dtype = self.shape, getattr(torch, self.dtype)
        used = torch.from_numpy(self.memory()[: self.n_rows * self.row_bytes]).view(dtype)
        kv = used.view(self.n_rows, s.n_kv_heads, 2, s.tokens, s.head_dim)
        # Two forms of the same work: heads as heads, or a group's queries as positions.
        flat = torch.from_numpy(self.q).view(dtype)
        forms = {
            True: flat.view(self.n_rows, s.n_heads, 1, s.head_dim),
            False: flat.view(self.n_rows, s.n_kv_heads, -1, s.head_dim),
        }

        def attend(rows: slice, gqa: bool) -> None:
            torch.nn.functional.scaled_dot_product_attention(
                forms[gqa][rows], kv[rows, :, 0], kv[rows, :, 1], enable_gqa=gqa
            )

        def seconds(gqa: bool) -> float:
            attend(slice(0, 4), gqa)
            start = time.perf_counter()
            attend(slice(4, 12), gqa)
            return time.perf_counter() - start

        better = min((True, False), key=seconds)
        batch = max(1, self.n_rows // 8)

        def run() -> None:
            for at in range(0, self.n_rows, batch):
                attend(slice(at, at + batch), better)

        return run

    def close(self) -> None:
        """Ends the workers and removes the segments."""
        for process in self.processes:
            process.kill()
            process.wait()
        sg.unlink_all(self.segments)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to the bits of `dtype`; 16-bit floats as uint16."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measure(bench: Bench, args: argparse.Namespace) -> tuple[dict[str, Series], list[str]]:
    """Every contender, repetition by repetition, and each repetition's best read pattern."""
    contenders: dict[str, Callable[[], None]] = {"kernel": bench.kernel}
    if args.workers > 0:
        bench.start_workers()
        contenders["workers"] = bench.through_workers
    attend = None if args.no_torch else bench.torch_attention()
    if attend is not None:
        contenders["torch sdpa"] = attend
    for run in contenders.values():
        for _ in range(WARM_RUNS):
            run()
    series = {name: Series() for name in ("ceiling", *contenders)}
    patterns = []
    for _ in range(args.repeat):
        pattern, ceiling = bench.ceiling()
        patterns.append(pattern)
        series["ceiling"].add(ceiling, ceiling)
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            series[name].add(bench.n_rows * bench.row_bytes / seconds / 1e9, ceiling)
    return series, patterns


def report(series: dict[str, Series], patterns: list[str], args: argparse.Namespace) -> None:
    """Prints medians: a table, or one JSON line per contender."""
    isa = nn.active_isa() if args.isa == "auto" else args.isa
    if not args.json:
        print(
            f"{args.shape} {args.dtype} threads={args.threads} isa={isa} page={args.page_size} "
            f"cache={args.cache_gib} GiB; ceiling: {statistics.mode(patterns)}"
        )
    for name, values in series.items():
        rate, fraction = statistics.median(values.gb_per_s), statistics.median(values.fraction)
        if not args.json:
            low, high = min(values.fraction), max(values.fraction)
            print(f"  {name:<11}{rate:8.1f} GB/s  fraction {fraction:.2f}  [{low:.2f}, {high:.2f}]")
            continue
        line = {"shape": args.shape, "dtype": args.dtype, "threads": args.threads}
        line |= {"workers": args.workers, "page_size": args.page_size, "isa": isa, "what": name}
        line |= {"gb_per_s": round(rate, 2), "fraction": round(fraction, 3)}
        print(json.dumps(line))


def parse_args() -> argparse.Namespace:
    """Exits with a message that names the argument and its limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=0, help="worker processes (0: none)")
    parser.add_argument("--page-size", type=int, default=128, help="tokens of a CPU-cache page")
    parser.add_argument("--cache-gib", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--isa", default="auto", help="auto or one kernel variant")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", action="store_true", help="one line per contender")
    args = parser.parse_args()
    for name in ("threads", "page_size", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; at least 1")
    if args.workers < 0 or args.workers > args.threads:
        parser.error(f"--workers is {args.workers}; it must be from 0 to --threads")
    return args


def main() -> None:
    """Measures, then prints."""
    args = parse_args()
    bench = Bench(args)
    try:
        series, patterns = measure(bench, args)
    finally:
        bench.close()
    report(series, patterns, args)


if __name__ == "__main__":
    main()
