"""How much of a sequence a program reads at a time, by dtype and head size.

Attention on 16-bit heads of up to 128: the best of some 100 combinations on an H200. Wider rows
take less at a time, so that the tiles of K and V fit into the 99 KiB of shared memory that a
program has on compute capability 8.6 and 8.9, and so does fp32, whose products take registers
instead of tensor cores, so that little is spilled (docs/decisions.md).
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 16  # tokens; a matrix product takes no fewer
# Copies between the caches. PCIe 5 x16 at 1.5 us a round trip needs 96 KiB under way at any time,
# and a program, which first looks up a table, waits for bytes some two thirds of its time. A matrix
# product fills a processor, so that it starts on none that has a program of a copy, however small:
# few programs, of as many warps as keep the values of a tile in registers (docs/benchmarks.md).
COPY_PROGRAMS = 8
COPY_BYTES = 32 * 1024  # of the CPU-cache that a program has under way
COPY_WARPS = 16


@dataclass(frozen=True)
class CopyTiles:
    """How a copy between the caches is shared out."""

    programs: int  # at most
    rows: int  # tokens of one page that a program moves at a time
    tiles: int  # of them: K or V of one head each
    warps: int  # of a program


def copy_tiles(
    dim_pad: int,
    itemsize: int,
    page_size: int,
    kv_heads: int,
    programs: int = COPY_PROGRAMS,
    under_way: int = COPY_BYTES,
    warps: int = COPY_WARPS,
) -> CopyTiles:
    """``itemsize``: bytes of a value in the CPU-cache; ``under_way``: bytes, a power of two."""
    values = under_way // itemsize
    rows = max(1, min(values // (2 * dim_pad), _binary_part(page_size)))
    tiles = max(1, min(values // (rows * dim_pad), 2 * _binary_part(kv_heads)))
    return CopyTiles(programs, rows, tiles, warps)


def _binary_part(n: int) -> int:
    """The largest power of two that divides it."""
    return n & -n


def decode_tiles(heads: int, splits: int, dim_pad: int, itemsize: int) -> tuple[int, int, int]:
    """Tokens a step, warps and stages of decode attention; ``heads``: rows x KV heads."""
    few = splits == 1 and heads < 384  # programs
    tile, warps, stages = (128, 4, 2) if few else (64, 2, 3)
    return max(LEAST, tile // _shrink(dim_pad, itemsize)), warps, stages


def prefill_tiles(dim_pad: int, itemsize: int) -> tuple[int, int, int]:
    """Tokens a step, warps and stages of prefill attention."""
    shrink = _shrink(dim_pad, itemsize)
    if shrink == 1:
        return 64, 4, 2
    return max(LEAST, 64 // shrink), 8, 2 if shrink < 8 else 1


def mixed_tiles(dim_pad: int, itemsize: int) -> tuple[int, int, int]:
    """The same where decodes are in the launch too."""
    return (32, 4, 2) if _shrink(dim_pad, itemsize) == 1 else prefill_tiles(dim_pad, itemsize)


def _shrink(dim_pad: int, itemsize: int) -> int:
    """1 for 16-bit heads of up to 128; ``dim_pad``: a power of two, ``itemsize``: bytes."""
    return max(1, dim_pad * itemsize**2 // 512)
