"""Segments of a small random model, a float64 reference, and worker processes to break."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import neo_native as nn
from neo_native import segments as sg

F32, F16, BF16 = 0, 1, 2
ROOT = Path(__file__).parents[3]
NONE = np.zeros(0, np.uint32)
LEASE_US = 60_000_000  # so long that no loaded machine lets one end; tests of faults set it
SHORT_LEASE_US = 20_000


def geometry(**changes: int) -> nn.Array:
    fields = {
        "n_layers": 2,
        "n_heads": 8,
        "n_kv_heads": 2,
        "head_dim": 64,
        "act_dtype": F32,
        "kv_dtype": F32,
        "block_size": 16,
        "page_size": 16,
        "n_pages": 256,
        "max_slots": 8,
        "max_rows": 8,
        "max_tokens": 64,
        "max_blocks": 16,
        "max_pages": 48,
        "max_tasks": 128,
        "max_swaps": 8,
        "n_plans": 4,
        "max_workers": 6,
        "lease_us": LEASE_US,
    }
    return nn.make_geometry(**(fields | changes))


def encode(x: nn.Array, dtype: int) -> nn.Array:
    if dtype == F32:
        return x.astype(np.float32)
    if dtype == F16:
        return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(x: nn.Array, dtype: int) -> nn.Array:
    if dtype == F32:
        return x.astype(np.float64)
    if dtype == F16:
        return x.view(np.float16).astype(np.float64)
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def attention(q: nn.Array, k: nn.Array, v: nn.Array) -> nn.Array:
    """float64; q [n_heads, d], k and v [tokens, n_kv_heads, d]."""
    group = q.shape[0] // k.shape[1]
    out = np.empty(q.shape)
    for head, query in enumerate(q):
        scores = k[:, head // group] @ query / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // group] / weights.sum()
    return out


class Rig:
    """One instance with every slot's pages filled with random K and V."""

    def __init__(self, geo: nn.Array, seed: int = 0) -> None:
        self.geo = geo
        self.rng = np.random.default_rng(seed)
        self.segments = sg.create_all(geo)
        self.control = nn.Control(self.segments.control)
        self.sequences = nn.Sequences(self.segments.sequences, geo)
        self.cache = nn.CpuCache(self.segments.cpu_cache, self.sequences, geo)
        self.k: dict[tuple[int, int], nn.Array] = {}
        self.v: dict[tuple[int, int], nn.Array] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def dim(self, name: str) -> int:
        return int(self.geo[name])

    def fill(self, tokens: list[int]) -> None:
        """Slot i gets tokens[i] random tokens in scattered pages of every layer."""
        free = self.rng.permutation(self.dim("n_pages")).astype(np.uint32)
        used = 0
        for slot, n in enumerate(tokens):
            pages = -(-n // self.dim("page_size"))
            self.sequences.page_table[slot, :pages] = free[used : used + pages]
            used += pages
            for layer in range(self.dim("n_layers")):
                shape = (n, self.dim("n_kv_heads"), self.dim("head_dim"))
                act = self.dim("act_dtype")
                k = encode(self.rng.standard_normal(shape) * 2, act)
                v = encode(self.rng.standard_normal(shape), act)
                self.cache.store_span(layer, slot, 0, k, v)
                stored = self.dim("kv_dtype")
                self.k[layer, slot] = decode(encode(decode(k, act), stored), stored)
                self.v[layer, slot] = decode(encode(decode(v, act), stored), stored)

    def queries(self, n: int) -> nn.Array:
        shape = (n, self.dim("n_heads"), self.dim("head_dim"))
        return encode(self.rng.standard_normal(shape), self.dim("act_dtype"))

    def expected(self, layer: int, q: nn.Array, slots: nn.Array, lens: nn.Array) -> nn.Array:
        rows = decode(q, self.dim("act_dtype"))
        return np.stack(
            [
                attention(row, self.k[layer, int(s)][:n], self.v[layer, int(s)][:n])
                for row, s, n in zip(rows, slots, lens, strict=True)
            ]
        )

    def exchange(self) -> nn.Exchange:
        return nn.Exchange(self.control, self.segments.work, self.segments.exchange, self.geo)

    def thread_worker(self, row: int, n_threads: int = 1, fault: str = "") -> nn.AttentionWorker:
        """A worker in this process (the row's lock is not needed for that)."""
        s = self.segments
        return nn.AttentionWorker(
            self.control, s.work, s.exchange, s.cpu_cache, s.sequences, row, n_threads, [], fault
        )

    def spawn(self, fault: str = "", threads: int = 1) -> subprocess.Popen[bytes]:
        code = (
            "from neo_native import segments; from cpu_attn_worker.worker import serve;"
            f"serve(segments.attach_all({self.segments.location.instance_id!r},"
            f"cpu_cache_writable=False), {threads}, {fault!r})"
        )
        path = os.pathsep.join(entry for entry in [str(ROOT), *sys.path] if entry)
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}
        )
        self.processes.append(process)
        return process

    def wait_for_workers(self, n: int) -> None:
        wait_until(lambda: int((self.control.worker_rows()["state"] == 2).sum()) >= n)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        sg.unlink_all(self.segments)
        self.segments.close()


def wait_until(condition, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rsplit(")", 1)[1].split()[0] == "T"


def resume(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)


@contextmanager
def rig(tokens: list[int], seed: int = 0, **changes: int) -> Iterator[Rig]:
    made = Rig(geometry(**changes), seed)
    try:
        made.fill(tokens)
        yield made
    finally:
        made.close()


class Plan:
    """Runs jobs through an exchange and checks every row against the reference."""

    def __init__(self, r: Rig, slots: list[int], lens: list[int], plan_id: int = 0) -> None:
        self.rig, self.slots = r, np.array(slots, np.uint32)
        self.lens, self.plan_id = np.array(lens, np.uint32), plan_id
        self.n_tasks = 0  # of one layer, once run

    def run(self, exchange: nn.Exchange, channel: int = 0, timeout_s: float = 60.0) -> None:
        pair = (self.slots, NONE) if channel == 0 else (NONE, self.slots)
        lens = (self.lens, NONE) if channel == 0 else (NONE, self.lens)
        exchange.begin_plan(self.plan_id, pair, lens)
        self.n_tasks = exchange.n_tasks(channel)
        for layer in range(self.rig.dim("n_layers")):
            q = self.rig.queries(len(self.slots))
            exchange.publish(channel, layer, q)
            assert exchange.wait(channel, timeout_s), f"layer {layer} was never done"
            out = np.zeros_like(q)
            exchange.collect(channel, out)
            act = self.rig.dim("act_dtype")
            np.testing.assert_allclose(
                decode(out, act),
                self.rig.expected(layer, q, self.slots, self.lens),
                atol=tolerance(act),
                rtol=0,
            )
        exchange.end_plan()


def tolerance(dtype: int) -> float:
    """Absolute, for outputs of order 1: rounding of the output type, plus float32 sums."""
    return {F32: 4e-6, F16: 2e-3, BF16: 1.6e-2}[dtype]
