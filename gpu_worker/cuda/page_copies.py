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
    TILES: tl.constexpr, TO_CPU: tl.constexpr, INT8: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Groups of ROWS tokens, ``table`` as in ``gpu_worker.cuda.spans``, layer after layer.

    OPEN: of the one span's groups only those that have tokens.

    ``cache``: the first of the layers in device memory. ``first_layer``: its number in the
    CPU-cache. A group lies in one page: ``page_size`` is a multiple of ROWS, so that what is read
    waits for one entry of the table. A program takes TILES of a layer's and group's 2 * KV_HEADS (K
    and V of each head) after the other: much is under way at a time, so that few programs suffice
    and leave the device to others.
    """
    shares: tl.constexpr = 2 * KV_HEADS // TILES
    if OPEN:
        n_groups = tl.minimum(n_groups, tl.cdiv(tl.load(table + 1), ROWS))
    d = tl.arange(0, DIM_PAD)
    r = tl.arange(0, TILES * ROWS)  # the tokens of each tile
    for item in range(tl.program_id(0), n_groups * layers * shares, tl.num_programs(0)):
        side = item % shares * TILES + r // ROWS
        h, is_v = side // 2, (side % 2).to(tl.int64)
        group = first_group + item // shares % n_groups
        layer = tl.cast(item // shares // n_groups, tl.int64)
        span = table if OPEN else table + tl.load(table + groups_at + group) * 4
        first = (group - tl.load(span)) * ROWS
        n = first + r % ROWS
        there = n < tl.load(span + 1)
        here = there[:, None] & (d < HEAD_DIM)[None, :]
        blocks = table + entries_at + tl.load(span + 2)
        pages = table + entries_at + tl.load(span + 3)
        page = tl.load(pages + first // page_size).to(tl.int64)
        row = first % page_size + r % ROWS
        block = tl.load(blocks + n // block_size, mask=there, other=0).to(tl.int64)
        slot = block * block_size + n % block_size
        at = is_v * cache_plane + (slot * KV_HEADS + h) * HEAD_DIM
        on_gpu = cache + layer * cache_layer + at[:, None] + d[None, :]
        tile = ((first_layer + layer) * n_pages + page) * (2 * KV_HEADS) + side
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
            # Scales last: with them first the compiler waits for some of x before it asks for all.
            x = tl.load(on_cpu, mask=here, other=0).to(tl.float32)
            if INT8:
                x = x * tl.load(at_scale, mask=there, other=0.0)[:, None]
            tl.store(on_gpu, x.to(cache.dtype.element_ty), mask=here)
