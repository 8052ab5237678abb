"""Kernels of offloading: byte for byte against the extension's CPU-cache, and with cpu workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import neo_native as native
from gpu_worker.cuda.buckets import mixed_shape
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.plan import CpuChunk, HostPlan
from gpu_worker.cuda.ride_trial import captured
from gpu_worker.ops.rope import rope_table
from neo_native import RowKind, SwapKind, WireDType
from protos.config import DType
from tests.gpu.kernel_rig import (
    DEVICE,
    LAYER,
    LEN,
    PAGE_SIZE,
    TOLERANCE,
    KernelRig,
    assert_close,
    inference,
    make_rig,
    on_host,
    peaked,
    run_attention,
)
from tests.helpers.engine_rig import Row

__all__ = ["inference"]  # a fixture of every test

# Activations, wire dtype of the CPU-cache
CACHES = [
    (DType.BFLOAT16, WireDType.BFLOAT16),
    (DType.FLOAT32, WireDType.FLOAT32),
    (DType.FLOAT32, WireDType.BFLOAT16),
    (DType.BFLOAT16, WireDType.INT8),
    (DType.FLOAT32, WireDType.INT8),
]
ONLY_HEADS = [(64, 2), (80, 3), (128, 1), (256, 2)]  # head_dim, group


@pytest.fixture(params=CACHES, ids=str)
def kinds(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=ONLY_HEADS, ids=str)
def offloading(request: pytest.FixtureRequest, kinds: Any) -> Iterator[KernelRig]:
    head_dim, group = request.param
    made = make_rig(head_dim, group, dtype=kinds[0], kv_code=kinds[1])
    yield made
    made.close()


def test_rope_and_stores(offloading: KernelRig) -> None:
    """K and V in both caches and Q for the cpu workers, all as the projection holds them after."""
    r = offloading
    rows = [
        Row(0, RowKind.PREFILL_GPU, 20, [5] * 40),
        Row(1, RowKind.PREFILL_CPU, 0, [5] * 50),
        Row(2, RowKind.DECODE_GPU, 100, [5]),
        Row(3, RowKind.DECODE_CPU, 77, [5]),
        Row(4, RowKind.DECODE_CPU, 0, [5]),
    ]
    _, shape = r.upload(rows)
    n, c = shape.tokens, r.config
    q, k, v = peaked(r, n)
    k[45] = 0.0  # a row whose int8 scale is 0
    before = [x.double() for x in (q, k, v)]
    cache_before = r.cache.blocks.clone()
    r.stages.store(shape, LAYER)  # no plan is announced: nothing is published
    torch.cuda.synchronize()

    positions = np.concatenate([row.start + np.arange(len(row.tokens)) for row in rows])
    cos, sin = rope_table(c, LEN, DEVICE)[positions].double().unsqueeze(2).unbind(1)
    for found, x in zip((q, k), before, strict=False):
        a, b = x.chunk(2, dim=-1)
        wanted = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        assert_close(found.flatten(0, 1), wanted.flatten(0, 1), TOLERANCE[r.dtype])
    assert torch.equal(v.double(), before[2])

    slots = np.repeat([row.slot for row in rows], [len(row.tokens) for row in rows])
    on_gpu = np.isin(slots, [0, 2])
    expected = cache_before[LAYER]
    for i in np.flatnonzero(on_gpu):
        block = int(r.sequences.block_table[slots[i], positions[i] // r.block_size])
        expected[0, block, positions[i] % r.block_size] = k[i]
        expected[1, block, positions[i] % r.block_size] = v[i]
    assert torch.equal(r.cache.blocks[LAYER], expected)
    assert torch.equal(r.cache.blocks[0], cache_before[0])

    other, segment = r.host_cache()
    cpu = torch.from_numpy(np.flatnonzero(~on_gpu)).to(DEVICE)
    places = (x[~on_gpu].astype(np.uint32) for x in (slots, positions))
    other.store_rows(LAYER, *places, on_host(k[cpu]), on_host(v[cpu]))
    assert r.exchange is not None
    assert r.tiles(r.segments.cpu_cache) == r.tiles(segment)
    size = 2 * c.q_size
    handed = r.exchange.q(0)[:size].view(2, c.num_attention_heads, c.head_dim)
    assert torch.equal(handed, q[[n - 2, n - 1]].cpu())


@pytest.mark.parametrize("n", [1, PAGE_SIZE, 100, 300])
def test_a_swap_out_writes_what_the_extension_would(offloading: KernelRig, n: int) -> None:
    r = offloading
    assert r.exchange is not None
    plan, _ = r.upload([Row(9, RowKind.DECODE_GPU, 0, [5])], swaps=[(6, SwapKind.OUT, n)])
    r.exchange.swap(r.cache.blocks, plan.swaps[0])
    torch.cuda.synchronize()
    other, segment = r.host_cache()
    for layer in range(r.config.num_hidden_layers):
        other.store_span(layer, 6, 0, *(on_host(x) for x in r.cached(layer, 6, n)))
    assert r.tiles(r.segments.cpu_cache) == r.tiles(segment)


def stored(r: KernelRig, slot: int, n: int) -> list[tuple[Tensor, Tensor]]:
    """Fills ``n`` tokens of a slot of the CPU-cache; by layer, K and V as the extension loads."""
    cache = native.CpuCache(r.segments.cpu_cache, r.sequences, r.geometry)
    found = []
    for layer in range(r.config.num_hidden_layers):
        made = [r.normal(n, r.config.num_key_value_heads, r.config.head_dim) for _ in range(2)]
        cache.store_span(layer, slot, 0, *(on_host(x) for x in made))
        loaded = [np.zeros_like(on_host(x)) for x in made]
        cache.load_span(layer, slot, 0, *loaded)
        k, v = (torch.from_numpy(x.view(np.int16) if x.dtype == np.uint16 else x) for x in loaded)
        found.append((k.view(r.dtype).to(DEVICE), v.view(r.dtype).to(DEVICE)))
    return found


@pytest.mark.parametrize("n", [1, PAGE_SIZE, 100, 300])
def test_a_swap_in_reads_what_the_extension_would(offloading: KernelRig, n: int) -> None:
    r = offloading
    assert r.exchange is not None
    wanted = stored(r, 6, n)
    before = r.cache.blocks.clone()
    plan, _ = r.upload([Row(9, RowKind.DECODE_GPU, 0, [5])], swaps=[(6, SwapKind.IN, n)])
    r.exchange.swap(r.cache.blocks, plan.swaps[0])
    torch.cuda.synchronize()
    for layer, (k, v) in enumerate(wanted):
        found = r.cached(layer, 6, n)
        assert torch.equal(found[0], k)
        assert torch.equal(found[1], v)
    written = (r.cache.blocks != before).flatten(4).any(-1).any(0).any(0)
    at = np.arange(n)
    allowed = torch.zeros_like(written)
    allowed[r.sequences.block_table[6, at // r.block_size].astype(np.int64), at % r.block_size] = 1
    assert not (written & ~allowed).any()


@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
def test_a_later_chunk_of_a_cpu_prefill_attends_over_its_pages(
    offloading: KernelRig, replayed: bool
) -> None:
    r = offloading
    wanted = stored(r, 5, 150)
    graph = None
    if replayed:  # captured before there is a chunk
        r.buffers.blank()
        place = replace(mixed_shape(128, 4, 1, cpu=True), cpu_rows=0)
        graph = captured(lambda: run_attention(r, place, 100))
    rows = [
        Row(0, RowKind.PREFILL_GPU, 0, [5] * 30),
        Row(5, RowKind.PREFILL_CPU, 150, [5] * 70),
    ]
    _, shape = r.upload(rows)
    assert shape.cpu_chunks == (CpuChunk(5, 150, 1),)
    q, k, v = peaked(r, 100)
    if graph is None:
        found = run_attention(r, shape, 100)
    else:
        graph.replay()
        found = r.buffers.channels[0].attn[:100].view(100, r.config.num_attention_heads, -1)
    k_then, v_then = wanted[LAYER]
    own = slice(30, 100)
    expected = [
        r.attention(q[:30], k[:30], v[:30], 0),
        r.attention(q[own], torch.cat((k_then, k[own])), torch.cat((v_then, v[own])), 150),
    ]
    assert_close(found.flatten(0, 1), torch.cat(expected).flatten(0, 1), TOLERANCE[r.dtype])


HANDED = [Row(2, RowKind.DECODE_GPU, 30, [5]), Row(3, RowKind.DECODE_CPU, 399, [5]),
          Row(4, RowKind.DECODE_CPU, 0, [5])]  # fmt: skip


def hand_off(r: KernelRig) -> tuple[HostPlan, Tensor]:
    """Announces a plan with two CPU rows and enqueues their job of the last layer."""
    stored(r, 3, 400)
    plan, shape = r.upload(HANDED, announce=True)
    peaked(r, 3)
    attn = r.buffers.channels[0].attn
    attn.fill_(7.0)
    r.buffers.outcome.zero_()
    r.stages.store(shape, LAYER)
    r.stages.join(shape, LAYER + 1)
    return plan, attn[:3].view(3, r.config.num_attention_heads, -1)


def test_the_cpu_workers_output_is_joined(offloading: KernelRig) -> None:
    r, exchange = offloading, offloading.exchange
    assert exchange is not None
    with r.worker(threads=2):
        plan, found = hand_off(r)
        torch.cuda.synchronize()
        assert exchange.last_epochs(plan) == {0: exchange.done_epoch(0)}
        exchange.retire(plan)
    assert int(r.buffers.voided(0)) == 0
    q, _, _ = r.projection(3)
    slots, lens = np.array([3, 4], np.uint32), np.array([400, 1], np.uint32)
    cache = native.CpuCache(r.segments.cpu_cache, r.sequences, r.geometry)
    wanted = torch.from_numpy(as_floats(native.attend(on_host(q[1:]), cache, LAYER, slots, lens)))
    assert_close(found[1:].cpu().flatten(0, 1), wanted.flatten(0, 1), TOLERANCE[r.dtype])
    assert (found[0] == 7.0).all()  # the GPU row's is not the join's


def test_a_job_that_the_host_gives_up_voids_the_channel(offloading: KernelRig) -> None:
    r, exchange = offloading, offloading.exchange
    assert exchange is not None
    with r.worker(threads=1):  # loads the kernels: to load one behind a wait is to wait for its end
        first, _ = hand_off(r)
        torch.cuda.synchronize()
        exchange.retire(first)
    plan, _ = hand_off(r)  # there is no cpu worker
    end = Event()
    end.record()
    time.sleep(0.05)
    assert not end.query()  # it waits
    exchange.give_up(exchange.last_epochs(plan))
    torch.cuda.synchronize()
    assert int(r.buffers.voided(0)) == 1
    assert int(r.buffers.waited_ns(0)) > 0
    exchange.retire(plan)


def as_floats(x: Any) -> Any:
    """float64 of what the extension returned; 16-bit values are bfloat16."""
    wide = x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)
    return wide.astype(np.float64)
