"""Triton kernels between the matrix products.

Embedding, norms, rotary embedding with the stores of K, V and Q, gated activation, greedy choice.

Each reproduces the rounding of ``gpu_worker.ops`` (fp32 inside, the activations' dtype between).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.cuda.quantize import quantize, scale_of


@triton.jit
def embed_kernel(
    ids, slots, last_tokens, embedding, residual, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of the embedding into the fp32 residual; id -1 means the slot's token sampled last."""
    t = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + t)
    if token < 0:
        token = tl.load(last_tokens + tl.load(slots + t))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    row = tl.load(embedding + token.to(tl.int64) * HIDDEN + at, mask=inside)
    tl.store(residual + t * HIDDEN + at, row.to(tl.float32), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    residual, delta, index, weight, out, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """``residual += delta``, then its norm times ``weight``; one token a program.

    INDEXED: row i of ``out`` is the norm of row ``index[i]``, and the residual is left alone.
    """
    i = tl.program_id(0).to(tl.int64)
    t = tl.load(index + i).to(tl.int64) if INDEXED else i
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    x = tl.load(residual + t * HIDDEN + at, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta + t * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        if not INDEXED:
            tl.store(residual + t * HIDDEN + at, x, mask=inside)
    mean = tl.sum(x * x, axis=0) / HIDDEN
    normed = (x * (1.0 / tl.sqrt_rn(mean + eps))).to(out.dtype.element_ty)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + i * HIDDEN + at, scaled, mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up`` of one token and one part of the inner dimension."""
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(gate_up + t * 2 * INNER + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * 2 * INNER + INNER + at, mask=inside, other=0.0)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + t * INNER + at, gated * up, mask=inside)


@triton.jit
def rotate(at, turn, d, there, rotated, HEAD_DIM: tl.constexpr):
    """Halves of the heads at ``at``, turned where ``rotated``; ``turn``: the position's angles."""
    first = tl.load(at, mask=there, other=0.0)
    second = tl.load(at + HEAD_DIM // 2, mask=there, other=0.0)
    cos = tl.load(turn + d, mask=d < HEAD_DIM // 2, other=0.0)[None, :]
    sin = tl.load(turn + d + HEAD_DIM // 2, mask=d < HEAD_DIM // 2, other=0.0)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    dtype = first.dtype
    first = tl.where(rotated, (a * cos - b * sin).to(dtype), first)
    second = tl.where(rotated, (b * cos + a * sin).to(dtype), second)
    return first, second


@triton.jit
def store_for_cpu(
    first, second, heads, d, there, page, row, q_row, tiles, scales, exchange_q,
    layer, n_pages, tile_stride, scale_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """K and V into the CPU-cache, unless ``page`` is -1; Q to the cpu workers, unless ``q_row`` is.

    int8 as ``layout::quantize``: scale = max / 127.
    """
    is_v = (heads >= HEADS + KV_HEADS).to(tl.int64)
    kv_head = heads - HEADS - is_v * KV_HEADS
    if page >= 0:
        tile = ((layer * n_pages + page) * KV_HEADS + kv_head) * 2 + is_v
        to = tiles + (tile * tile_stride + row * HEAD_DIM)[:, None] + d[None, :]
        is_kv = there & (heads >= HEADS)[:, None]
        a, b = first.to(tl.float32), second.to(tl.float32)
        if INT8:
            top = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=1)
            scale = scale_of(top)
            a, b = quantize(a, scale), quantize(b, scale)
            here = (heads >= HEADS) & (heads < HEADS + 2 * KV_HEADS)
            tl.store(scales + tile * scale_stride + row, scale, mask=here)
        tl.store(to, a.to(tiles.dtype.element_ty), mask=is_kv)
        tl.store(to + HEAD_DIM // 2, b.to(tiles.dtype.element_ty), mask=is_kv)
    if q_row >= 0:
        to = exchange_q + ((q_row * HEADS + heads) * HEAD_DIM)[:, None] + d[None, :]
        is_q = there & (heads < HEADS)[:, None]
        tl.store(to, first, mask=is_q)
        tl.store(to + HEAD_DIM // 2, second, mask=is_q)


@triton.jit(do_not_specialize=["layer"])  # one compiled kernel for all layers
def rope_store_kernel(
    qkv, positions, rope, cache, cache_slots, cache_plane,
    pages, page_rows, q_rows, tiles, scales, exchange_q,
    layer, n_pages, tile_stride, scale_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    PART: tl.constexpr, TO_CPU: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Rotates Q and K in place, then stores K and V into whichever cache the token belongs to.

    One program per token and PART heads of the fused projection. ``cache_slots``: flat index of the
    GPU-cache, or -1. ``pages``, ``page_rows``: place in the CPU-cache, or page -1. ``q_rows``: row
    of the exchange buffer for Q, or -1.
    """
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * PART + tl.arange(0, PART)
    d = tl.arange(0, HALF)
    there = (heads < HEADS + 2 * KV_HEADS)[:, None] & (d < HEAD_DIM // 2)[None, :]
    at = qkv + t * (HEADS + 2 * KV_HEADS) * HEAD_DIM + heads[:, None] * HEAD_DIM + d[None, :]
    turn = rope + tl.load(positions + t).to(tl.int64) * HEAD_DIM
    rotated = (heads < HEADS + KV_HEADS)[:, None]
    first, second = rotate(at, turn, d, there, rotated, HEAD_DIM)
    tl.store(at, first, mask=there & rotated)
    tl.store(at + HEAD_DIM // 2, second, mask=there & rotated)

    slot = tl.load(cache_slots + t).to(tl.int64)
    if slot >= 0:
        is_v = (heads >= HEADS + KV_HEADS).to(tl.int64)
        kv_head = heads - HEADS - is_v * KV_HEADS
        is_kv = there & (heads >= HEADS)[:, None]
        place = is_v * cache_plane + (slot * KV_HEADS + kv_head) * HEAD_DIM
        to = cache + place[:, None] + d[None, :]
        tl.store(to, first, mask=is_kv)
        tl.store(to + HEAD_DIM // 2, second, mask=is_kv)
    if TO_CPU:
        store_for_cpu(
            first, second, heads, d, there, tl.load(pages + t).to(tl.int64),
            tl.load(page_rows + t).to(tl.int64), tl.load(q_rows + t).to(tl.int64),
            tiles, scales, exchange_q, layer, n_pages, tile_stride, scale_stride,
            HEADS, KV_HEADS, HEAD_DIM, INT8,
        )  # fmt: skip


@triton.jit
def greedy_kernel(
    logits, slots, last_tokens, tokens, logprobs, vocab,
    VOCAB_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The likeliest token of a row (the first of equals) and its log-probability."""
    r = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB_PAD, BLOCK):
        inside = start + at < vocab
        x = tl.load(logits + r * vocab + start + at, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        top = tl.maximum(best, x)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(best - base) + tl.exp(x - base)
        which = tl.where(x > best, start + at, which)
        best = top
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, which, vocab), axis=0)
    mass = tl.sum(total * tl.exp(best - top), axis=0)
    tl.store(tokens + r, token)
    tl.store(logprobs + r, -tl.log(mass))
    tl.store(last_tokens + tl.load(slots + r), token)
