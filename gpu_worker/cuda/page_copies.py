"""The Triton kernel that moves tokens between the GPU-cache and the mapped pages of the CPU-cache.

There is no staging and no DMA behind it: a page's tiles are scattered by layer and head, and a DMA
for each costs more than its bytes do.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.cuda.quantize import quantize, scale_of

NOT_SPECIALIZED = [  # by what changes from copy to copy: nothing is compiled while plans run
    "groups_at", "entries_at", "first_group", "n_groups", "first_layer", "layers", "block_size",
    "page_size",
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def copy_pages_kernel(
    cache, cache_layer, cache_plane, tiles, scales, table, groups_at, entries_at,
    first_group, n_groups, first_layer, layers, block_size, page_size,
    n_pages, tile_stride, scale_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    TO_CPU: tl.constexpr, INT8: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Groups of ROWS tokens, ``table`` as in ``gpu_worker.cuda.spans``, layer after layer.

    OPEN: of the one span's groups only those that have tokens.

    ``cache``: the first of the layers in device memory. ``first_layer``: its number in the
    CPU-cache. A program takes K and V of one layer, group and head after the other: all of both is
    under way before any of it is used, so that few programs suffice and leave the device to others.
    """
    if OPEN:
        n_groups = tl.minimum(n_groups, tl.cdiv(tl.load(table + 1), ROWS))
    d = tl.arange(0, DIM_PAD)
    r = tl.arange(0, 2 * ROWS)  # K's tokens, then V's
    is_v = (r // ROWS).to(tl.int64)
    for item in range(tl.program_id(0), n_groups * layers * KV_HEADS, tl.num_programs(0)):
        h = item % KV_HEADS
        group = first_group + item // KV_HEADS % n_groups
        layer = tl.cast(item // KV_HEADS // n_groups, tl.int64)
        span = table if OPEN else table + tl.load(table + groups_at + group) * 4
        n = (group - tl.load(span)) * ROWS + r % ROWS
        there = n < tl.load(span + 1)
        here = there[:, None] & (d < HEAD_DIM)[None, :]
        blocks = table + entries_at + tl.load(span + 2)
        pages = table + entries_at + tl.load(span + 3)
        block = tl.load(blocks + n // block_size, mask=there, other=0).to(tl.int64)
        page = tl.load(pages + n // page_size, mask=there, other=0).to(tl.int64)
        slot = block * block_size + n % block_size
        row = n % page_size
        at = is_v * cache_plane + (slot * KV_HEADS + h) * HEAD_DIM
        on_gpu = cache + layer * cache_layer + at[:, None] + d[None, :]
        tile = (((first_layer + layer) * n_pages + page) * KV_HEADS + h) * 2 + is_v
        on_cpu = tiles + (tile * tile_stride + row * HEAD_DIM)[:, None] + d[None, :]
        at_scale = scales + tile * scale_stride + row
        if TO_CPU:
            x = tl.load(on_gpu, mask=here, other=0.0).to(tl.float32)
            if INT8:
                scale = scale_of(tl.max(tl.abs(x), axis=1))
                x = quantize(x, scale)
                tl.store(at_scale, scale, mask=there)
            tl.store(on_cpu, x.to(tiles.dtype.element_ty), mask=here)
        else:
            x = tl.load(on_cpu, mask=here, other=0).to(tl.float32)
            if INT8:
                x = x * tl.load(at_scale, mask=there, other=0.0)[:, None]
            tl.store(on_gpu, x.to(cache.dtype.element_ty), mask=here)
