"""Kernels of the CUDA path against float64, and byte for byte against the extension's CPU-cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytest.importorskip("triton")

import triton

import neo_native as native
from gpu_worker.cuda import elementwise
from gpu_worker.cuda.buckets import Shape, mixed_shape
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.plan import CpuChunk, HostPlan
from gpu_worker.cuda.ride_trial import captured
from gpu_worker.cuda.stages import GREEDY_BLOCK
from gpu_worker.geometry_check import WIRE_DTYPES, WIRE_KV_DTYPES
from gpu_worker.ops.rope import rope_table
from neo_native import RowKind, SwapKind
from protos.config import DType, KvCacheDType
from tests.gpu.kernel_rig import (
    DEVICE,
    LEN,
    PAGE_SIZE,
    TOLERANCE,
    KernelRig,
    assert_close,
    config_of,
    on_host,
)
from tests.helpers.engine_rig import Row

# head_dim, query heads per KV head, block size
SHAPES = [(64, 1, 8), (64, 8, 16), (80, 3, 16), (96, 2, 32), (128, 4, 16), (128, 5, 8),
          (128, 7, 32), (256, 6, 16)]  # fmt: skip
DTYPES = [DType.BFLOAT16, DType.FLOAT32]
INT8 = WIRE_KV_DTYPES[KvCacheDType.INT8]
# Lengths around the edges of blocks and of the 64 tokens that a program reads at a time.
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 128, 129, 300, LEN]
LAYER = 1


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_rig(
    head_dim: int = 64,
    group: int = 2,
    block_size: int = 16,
    dtype: DType = DType.BFLOAT16,
    kv_code: int | None = None,
    vocab_size: int = 320,
) -> KernelRig:
    config = config_of(head_dim, 2 * group, 2, vocab_size)
    return KernelRig(config, dtype, block_size, kv_code)


def peaked(r: KernelRig, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fills Q, K and V of ``n`` tokens; scores spread so that few tokens matter to each query."""
    q, k, v = r.projection(n)
    q.copy_(r.normal(*q.shape, scale=4.0))
    k.copy_(r.normal(*k.shape))
    v.copy_(r.normal(*v.shape))
    return q, k, v


def run_attention(r: KernelRig, shape: Shape, n: int) -> Tensor:
    """Output by token, [n, heads, head_dim]; 7 where no kernel wrote."""
    attn = r.buffers.channels[0].attn
    if shape.has_chunk:  # whose earlier tokens come layer by layer
        r.stages.begin_chunks([shape], LAYER + 1)
        for layer in range(LAYER):
            r.stages.attend(shape, layer)
    attn.fill_(7.0)
    r.stages.attend(shape, LAYER)
    heads = r.config.num_attention_heads
    return attn[:n].view(n, heads, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "block_size"), SHAPES)
@pytest.mark.parametrize("splits", [0, 1, 2, 64])
def test_decode_attention(
    head_dim: int, group: int, block_size: int, dtype: DType, splits: int
) -> None:
    r = make_rig(head_dim, group, block_size, dtype)
    rows = [Row(i, RowKind.DECODE_GPU, n - 1, [5]) for i, n in enumerate(LENGTHS)]
    _, shape = r.upload(rows)
    spare = 1  # row that a graph's bucket has and the plan has not
    n = len(rows) + spare
    shape = Shape(0, n, n, splits=splits)
    assert n * splits * r.config.num_attention_heads <= len(r.buffers.part_o)
    q, _, _ = peaked(r, n)
    found = run_attention(r, shape, n)
    wanted = [
        r.attention(q[i : i + 1], *r.cached(LAYER, i, length), start=length - 1)
        for i, length in enumerate(LENGTHS)
    ]
    assert_close(found[: len(rows)].flatten(0, 1), torch.cat(wanted).flatten(0, 1),
                 TOLERANCE[r.dtype])  # fmt: skip
    assert (found[len(rows) :] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "block_size"), SHAPES)
def test_prefill_attention_with_and_without_earlier_tokens(
    head_dim: int, group: int, block_size: int, dtype: DType
) -> None:
    r = make_rig(head_dim, group, block_size, dtype)
    spans = [(0, 1), (0, 63), (0, 64), (0, 65), (5, 3), (64, 64), (100, 70), (17, 130), (382, 130)]
    rows = [Row(i, RowKind.PREFILL_GPU, start, [5] * new) for i, (start, new) in enumerate(spans)]
    _, shape = r.upload(rows)
    n = shape.tokens
    q, k, v = peaked(r, n)
    found = run_attention(r, shape, n)
    at, wanted = 0, []
    for slot, (start, new) in enumerate(spans):
        own = slice(at, at + new)
        k_then, v_then = r.cached(LAYER, slot, start)
        wanted.append(
            r.attention(q[own], torch.cat((k_then, k[own])), torch.cat((v_then, v[own])), start)
        )
        at += new
    assert_close(found.flatten(0, 1), torch.cat(wanted).flatten(0, 1), TOLERANCE[r.dtype])


def test_a_batch_of_decodes_and_prefills_gives_each_its_own_table() -> None:
    r = make_rig(128, 4)
    rows = [
        Row(0, RowKind.PREFILL_GPU, 40, [5] * 70),
        Row(1, RowKind.PREFILL_GPU, 0, [5] * 10),
        Row(2, RowKind.DECODE_GPU, 199, [5]),
        Row(3, RowKind.DECODE_GPU, 30, [5]),
    ]
    _, shape = r.upload(rows)
    q, k, v = peaked(r, shape.tokens)
    found = run_attention(r, shape, shape.tokens)
    k_then, v_then = r.cached(LAYER, 0, 40)
    wanted = [
        r.attention(q[:70], torch.cat((k_then, k[:70])), torch.cat((v_then, v[:70])), 40),
        r.attention(q[70:80], k[70:80], v[70:80], 0),
        r.attention(q[80:81], *r.cached(LAYER, 2, 200), start=199),
        r.attention(q[81:82], *r.cached(LAYER, 3, 31), start=30),
    ]
    assert_close(found.flatten(0, 1), torch.cat(wanted).flatten(0, 1), TOLERANCE[r.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 70])
def test_the_linear_stage(dtype: DType, tokens: int) -> None:
    r = make_rig(64, 3, 16, dtype)
    c, w, eps = r.buffers.channels[0], r.stages.model.weights, r.config.rms_norm_eps
    c.residual.copy_(torch.randn(c.residual.shape, generator=r.random, device=DEVICE))
    c.attn.copy_(r.normal(*c.attn.shape))
    x, attn = c.residual[:tokens].double(), c.attn[:tokens].double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.double(), eps)

    shape = Shape(0, tokens, 0)
    r.stages.linear(shape, 0)
    wanted = norm(x, w.layers[0].input_norm) @ w.layers[0].qkv.double().t()
    assert_close(c.qkv[:tokens], wanted, TOLERANCE[r.dtype])
    assert torch.equal(c.residual[:tokens].double(), x)

    r.stages.linear(shape, 1)
    first = w.layers[0]
    x = x + attn @ first.o.double().t()
    gate, up = (norm(x, first.post_norm) @ first.gate_up.double().t()).chunk(2, dim=-1)
    x = x + (F.silu(gate) * up) @ first.down.double().t()
    assert_close(c.residual[:tokens], x, TOLERANCE[r.dtype])
    wanted = norm(x, w.layers[1].input_norm) @ w.layers[1].qkv.double().t()
    assert_close(c.qkv[:tokens], wanted, TOLERANCE[r.dtype])


def test_a_continuing_row_is_embedded_from_the_token_sampled_last() -> None:
    r = make_rig()
    _, shape = r.upload([Row(3, RowKind.DECODE_GPU, 9, [-1]), Row(5, RowKind.DECODE_GPU, 9, [17])])
    r.buffers.last_tokens[3] = 211
    r.buffers.last_tokens[5] = 4
    r.stages.forward([shape])
    # Layers add to the residual, so it is compared with that of a plan that names the tokens.
    found = r.buffers.channels[0].residual[:2].clone()
    _, named = r.upload([Row(3, RowKind.DECODE_GPU, 9, [211]), Row(5, RowKind.DECODE_GPU, 9, [17])])
    r.stages.forward([named])
    assert torch.equal(found, r.buffers.channels[0].residual[:2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_takes_the_sampled_rows(dtype: DType) -> None:
    r = make_rig(dtype=dtype)
    rows = [
        Row(0, RowKind.PREFILL_GPU, 0, [5] * 40),
        Row(1, RowKind.PREFILL_GPU, 0, [5] * 3, sample=False),
        Row(7, RowKind.DECODE_GPU, 20, [5]),
    ]
    _, shape = r.upload(rows)
    c, b, w = r.buffers.channels[0], r.buffers, r.stages.model.weights
    c.residual.copy_(torch.randn(c.residual.shape, generator=r.random, device=DEVICE))
    b.delta.copy_(r.normal(*b.delta.shape))
    before = c.residual.clone()
    r.stages.head(shape)
    at = torch.tensor([39, 43], device=DEVICE)
    x = before[at].double() + b.delta[at].double()
    normed = F.rms_norm(x, (x.shape[-1],), w.norm.double(), r.config.rms_norm_eps)
    logits = b.logits[0, :2]
    assert_close(logits, normed @ w.head.double().t(), TOLERANCE[r.dtype])
    tokens = logits.argmax(dim=-1)
    assert b.tokens_out(0)[:2].tolist() == tokens.tolist()
    assert b.last_tokens[[0, 7]].tolist() == tokens.tolist()
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(b.logprobs_out(0)[:2].double(), wanted, atol=1e-5, rtol=0)
    assert torch.equal(c.residual, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [320, GREEDY_BLOCK, GREEDY_BLOCK + 1, 49152, 128256])
def test_greedy_is_argmax_and_log_softmax(vocab: int, dtype: torch.dtype) -> None:
    random = torch.Generator(device=DEVICE).manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=random, device=DEVICE) * 5
    logits[1, [vocab // 3, vocab - 1]] = 60.0  # equals: the first
    logits[2, vocab - 1] = 100.0
    logits[3] = -1e4
    logits[3, 0] = -9e3
    logits[4, : vocab - 2] = -torch.inf
    logits[5] = 3.0
    logits = logits.to(dtype)
    slots = torch.tensor([4, 0, 5, 1, 3, 2], dtype=torch.int32, device=DEVICE)
    last, tokens = (torch.full((n,), -9, dtype=torch.int32, device=DEVICE) for n in (7, 6))
    logprobs = torch.zeros(6, device=DEVICE)
    elementwise.greedy_kernel[(6,)](
        logits, slots, last, tokens, logprobs, vocab,
        VOCAB_PAD=triton.cdiv(vocab, GREEDY_BLOCK) * GREEDY_BLOCK, BLOCK=GREEDY_BLOCK, num_warps=16,
    )  # fmt: skip
    best = logits.double().max(dim=-1).values
    first = (logits.double() == best[:, None]).int().argmax(dim=-1)
    assert tokens.tolist() == first.tolist()
    assert last[slots.long()].tolist() == first.tolist()
    assert last[6] == -9
    wanted = best - logits.double().logsumexp(-1)
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-4, rtol=1e-5)


# Activations, wire dtype of the CPU-cache
CACHES = [
    (DType.BFLOAT16, WIRE_DTYPES[DType.BFLOAT16]),
    (DType.FLOAT32, WIRE_DTYPES[DType.FLOAT32]),
    (DType.FLOAT32, WIRE_DTYPES[DType.BFLOAT16]),
    (DType.BFLOAT16, INT8),
    (DType.FLOAT32, INT8),
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
