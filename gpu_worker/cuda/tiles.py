"""How much of a sequence an attention program reads at a time, by dtype and head size.

16-bit heads of up to 128: the best of some 100 combinations on an H200. Wider rows take less at a
time, so that the tiles of K and V fit into the 99 KiB of shared memory that a program has on
compute capability 8.6 and 8.9, and so does fp32, whose products take registers instead of tensor
cores, so that little is spilled (docs/decisions.md).
"""

from __future__ import annotations

LEAST = 16  # tokens; a matrix product takes no fewer


def decode_tiles(heads: int, splits: int, dim_pad: int, itemsize: int) -> tuple[int, int, int]:
    """Tokens a step, warps and stages of decode attention; ``heads``: rows x KV heads."""
    if splits >= 8:
        tile, warps, stages = 32, 4, 3
    elif heads >= 512:
        tile, warps, stages = 64, 2, 3
    else:
        tile, warps, stages = 128, 4, 2
    return max(LEAST, tile // _shrink(dim_pad, itemsize)), warps, stages


def prefill_tiles(dim_pad: int, itemsize: int) -> tuple[int, int, int]:
    """Tokens a step, warps and stages of prefill attention."""
    shrink = _shrink(dim_pad, itemsize)
    if shrink == 1:
        return 64, 4, 3
    return max(LEAST, 64 // shrink), 8, 2 if shrink < 8 else 1


def _shrink(dim_pad: int, itemsize: int) -> int:
    """1 for 16-bit heads of up to 128; ``dim_pad``: a power of two, ``itemsize``: bytes."""
    return max(1, dim_pad * itemsize**2 // 512)
