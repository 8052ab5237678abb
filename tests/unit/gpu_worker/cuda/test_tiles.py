"""How much a program takes at a time."""

from __future__ import annotations

import pytest

from gpu_worker.cuda.tiles import COPY_BYTES, LEAST, MOST_COPIED, copy_tiles


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("dim_pad", [8, 64, 128, 256])
def test_a_program_of_a_copy_has_as_many_bytes_under_way_whatever_the_dtype(
    dim_pad: int, itemsize: int
) -> None:
    rows = copy_tiles(dim_pad, itemsize).rows
    assert rows.bit_count() == 1
    assert LEAST <= rows <= MOST_COPIED
    k_and_v = 2 * rows * dim_pad * itemsize
    assert k_and_v == COPY_BYTES or (k_and_v < COPY_BYTES and rows == MOST_COPIED)


def test_half_the_bytes_are_half_the_tokens() -> None:
    whole, half = copy_tiles(128, 1), copy_tiles(128, 1, under_way=COPY_BYTES // 2)
    assert half.rows == whole.rows // 2
