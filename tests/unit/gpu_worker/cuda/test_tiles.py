"""How much a program takes at a time."""

from __future__ import annotations

import pytest

from gpu_worker.cuda.tiles import COPY_BYTES, copy_tiles

PAGE, HEADS = 64, 8


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("dim_pad", [32, 64, 128, 256])
def test_a_program_of_a_copy_has_as_many_bytes_under_way_whatever_the_dtype(
    dim_pad: int, itemsize: int
) -> None:
    made = copy_tiles(dim_pad, itemsize, PAGE, HEADS)
    assert made.rows * made.tiles * dim_pad * itemsize == COPY_BYTES


@pytest.mark.parametrize("page_size", [1, 16, 24, 48, 64, 128, 4096])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 12])
def test_a_copy_is_cut_into_equal_parts_that_lie_in_a_page(page_size: int, kv_heads: int) -> None:
    made = copy_tiles(128, 1, page_size, kv_heads)
    assert page_size % made.rows == 0
    assert 2 * kv_heads % made.tiles == 0
    assert made.rows.bit_count() == made.tiles.bit_count() == 1


def test_half_the_bytes_are_half_the_values() -> None:
    sizes = 128, 1, PAGE, HEADS
    whole, half = copy_tiles(*sizes), copy_tiles(*sizes, under_way=COPY_BYTES // 2)
    assert 2 * half.rows * half.tiles == whole.rows * whole.tiles
