"""Triton kernels for attention over the paged GPU-cache."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(scores, v, top, total, acc):
    """One step of the online softmax: masked scores [q, n] and values [n, d] join the sums."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    p = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(p, axis=1), acc


@triton.jit
def _decode(
    r, h, split,
    qkv, cache, cache_plane, tables, table_stride, row_tokens, row_lens,
    out, part_o, part_ml, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row, one KV head, one split of its tokens (flash decoding, arXiv 2311.01282).

    ``row_lens`` 0: no such row. ``scale`` includes log2 e. Partial O is not normalised.
    """
    length = tl.load(row_lens + r)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    low = split * share
    high = tl.minimum(length, low + share)
    if low < length:
        token = tl.load(row_tokens + r).to(tl.int64)
        g = tl.arange(0, GROUP_PAD)
        d = tl.arange(0, DIM_PAD)
        in_dim = d < HEAD_DIM
        q_at = token * (HEADS + 2 * KV_HEADS) * HEAD_DIM + (h * GROUP + g)[:, None] * HEAD_DIM
        in_q = (g < GROUP)[:, None] & in_dim[None, :]
        q = tl.load(qkv + q_at + d[None, :], mask=in_q, other=0.0)
        table = tables + r.to(tl.int64) * tl.load(table_stride)
        top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
        for start in range(low, high, TILE):
            n = start + tl.arange(0, TILE)
            seen = n < high
            block = tl.load(table + n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            at = ((block * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + h) * HEAD_DIM
            k = tl.load(
                cache + at[None, :] + d[:, None], mask=seen[None, :] & in_dim[:, None], other=0.0
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            v = tl.load(
                cache + cache_plane + at[:, None] + d[None, :],
                mask=seen[:, None] & in_dim[None, :],
                other=0.0,
            )
            top, total, acc = _attend(scores, v, top, total, acc)
        if SPLITS == 1:
            to = out + token * HEADS * HEAD_DIM + (h * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_q)
        else:
            part = (r.to(tl.int64) * HEADS + h * GROUP + g) * SPLITS + split
            tl.store(part_o + part[:, None] * HEAD_DIM + d[None, :], acc, mask=in_q)
            tl.store(part_ml + part * 2, top, mask=g < GROUP)
            tl.store(part_ml + part * 2 + 1, total, mask=g < GROUP)


@triton.jit
def decode_kernel(
    qkv, cache, cache_plane, tables, table_stride, row_tokens, row_lens,
    out, part_o, part_ml, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Decodes: a program for each row, KV head and split."""
    _decode(
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        qkv, cache, cache_plane, tables, table_stride, row_tokens, row_lens,
        out, part_o, part_ml, scale,
        HEADS, KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, SPLITS,
    )  # fmt: skip


@triton.jit
def merge_splits_kernel(
    part_o, part_ml, row_tokens, row_lens, out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one row and head by log-sum-exp."""
    r, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(row_lens + r)
    if length > 0:
        share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
        s = tl.arange(0, SPLITS)
        used = s * share < length
        d = tl.arange(0, DIM_PAD)
        in_dim = d < HEAD_DIM
        part = (r * HEADS + head) * SPLITS + s
        m = tl.load(part_ml + part * 2, mask=used, other=float("-inf"))
        weight = tl.exp2(m - tl.max(m, axis=0))
        total = tl.load(part_ml + part * 2 + 1, mask=used, other=0.0) * weight
        o = tl.load(
            part_o + part[:, None] * HEAD_DIM + d[None, :],
            mask=used[:, None] & in_dim[None, :],
            other=0.0,
        )
        merged = tl.sum(o * weight[:, None], axis=0) / tl.sum(total, axis=0)
        token = tl.load(row_tokens + r).to(tl.int64)
        to = out + (token * HEADS + head) * HEAD_DIM + d
        tl.store(to, merged.to(out.dtype.element_ty), mask=in_dim)


@triton.jit
def _prefill(
    head, tile,
    qkv, cache, cache_plane, tables, table_stride, staging, staging_plane, out, scale,
    tile_rows, tile_firsts, row_tokens, row_news, row_starts, row_tables,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Causal attention of TILE_Q new tokens of one row and head.

    First over what its cache holds already, by block, or, with a ``row_tables`` below 0, what lies
    token by token in ``staging``; then over the row's own new K and V where the projection left
    them.
    """
    row = tl.load(tile_rows + tile)
    if row >= 0:
        h = head // (HEADS // KV_HEADS)
        first = tl.load(tile_firsts + tile)
        base = tl.load(row_tokens + row).to(tl.int64)
        new = tl.load(row_news + row)
        start = tl.load(row_starts + row)
        number = tl.load(row_tables + row).to(tl.int64)
        staged = number < 0
        earlier = tl.where(staged, staging, cache)
        plane = tl.where(staged, staging_plane, cache_plane)
        in_blocks = tl.where(staged, 0, start)
        table = tables + tl.maximum(number, 0) * tl.load(table_stride)
        width: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        i = first + tl.arange(0, TILE_Q)
        d = tl.arange(0, DIM_PAD)
        in_dim = d < HEAD_DIM
        in_q = (i < new)[:, None] & in_dim[None, :]
        q = tl.load(
            qkv + (base + i)[:, None] * width + head * HEAD_DIM + d[None, :], mask=in_q, other=0.0
        )
        top = tl.full((TILE_Q,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_Q,), tl.float32)
        acc = tl.zeros((TILE_Q, DIM_PAD), tl.float32)
        for at in range(0, start, TILE):
            n = at + tl.arange(0, TILE)
            seen = n < start
            block = tl.load(table + n // BLOCK_SIZE, mask=n < in_blocks, other=0).to(tl.int64)
            block = tl.where(staged, n // BLOCK_SIZE, block)
            place = ((block * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + h) * HEAD_DIM
            k = tl.load(
                earlier + place[None, :] + d[:, None],
                mask=seen[None, :] & in_dim[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            v = tl.load(
                earlier + plane + place[:, None] + d[None, :],
                mask=seen[:, None] & in_dim[None, :],
                other=0.0,
            )
            top, total, acc = _attend(scores, v, top, total, acc)
        own = qkv + base * width + HEADS * HEAD_DIM + h * HEAD_DIM
        for at in range(0, tl.minimum(new, first + TILE_Q), TILE):
            n = at + tl.arange(0, TILE)
            seen = n < new
            k = tl.load(
                own + n[None, :].to(tl.int64) * width + d[:, None],
                mask=seen[None, :] & in_dim[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(seen[None, :] & (n[None, :] <= i[:, None]), scores, float("-inf"))
            v = tl.load(
                own + KV_HEADS * HEAD_DIM + n[:, None].to(tl.int64) * width + d[None, :],
                mask=seen[:, None] & in_dim[None, :],
                other=0.0,
            )
            top, total, acc = _attend(scores, v, top, total, acc)
        to = out + ((base + i) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_q)


# Launches for further chunks begin at any tile: nothing is compiled while plans run.
@triton.jit(do_not_specialize_on_alignment=["tile_rows", "tile_firsts"])
def prefill_kernel(
    qkv, cache, cache_plane, tables, table_stride, staging, staging_plane, out, scale,
    tile_rows, tile_firsts, row_tokens, row_news, row_starts, row_tables,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Prefills. Heads are the quick index of the grid: tiles that are none begin last."""
    _prefill(
        tl.program_id(0), tl.program_id(1),
        qkv, cache, cache_plane, tables, table_stride, staging, staging_plane, out, scale,
        tile_rows, tile_firsts, row_tokens, row_news, row_starts, row_tables,
        HEADS, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_Q, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_tiles", "n_rows"])
def prefill_and_decode_kernel(
    n_tiles, n_rows,
    qkv, cache, cache_plane, tables, table_stride, staging, staging_plane, out, scale,
    tile_rows, tile_firsts, prefill_tokens, prefill_news, prefill_starts, prefill_tables,
    row_tokens, row_lens, part_o, part_ml,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Both at once: one is bound by arithmetic and latency, the other by memory.

    As in POD-Attention (arXiv 2410.18038). A prefill's programs take longer, so they begin first.
    """
    program = tl.program_id(0)
    if program < n_tiles * HEADS:  # heads are the quick index, as above
        _prefill(
            program % HEADS, program // HEADS,
            qkv, cache, cache_plane, tables, table_stride, staging, staging_plane, out, scale,
            tile_rows, tile_firsts, prefill_tokens, prefill_news, prefill_starts, prefill_tables,
            HEADS, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_Q, TILE,
        )  # fmt: skip
    else:
        at = program - n_tiles * HEADS
        _decode(
            at % n_rows, at // n_rows % KV_HEADS, at // n_rows // KV_HEADS,
            qkv, cache, cache_plane, tables, table_stride, row_tokens, row_lens,
            out, part_o, part_ml, scale,
            HEADS, KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, SPLITS,
        )  # fmt: skip
