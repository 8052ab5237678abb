from __future__ import annotations

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import BF16, F16, F32, decode, encode, rig

PAIRS = [(a, k) for a in (F32, F16, BF16) for k in (F32, F16, BF16)]


@pytest.mark.parametrize(("act", "kv"), PAIRS)
def test_what_was_stored_comes_back_rounded_to_the_cache_dtype(act: int, kv: int) -> None:
    with rig([40, 30], act_dtype=act, kv_dtype=kv) as r:
        for slot, n in ((0, 40), (1, 30)):
            k, v = (np.zeros((n, 2, 64), encode(np.zeros(1), act).dtype) for _ in "kv")
            r.cache.load_span(1, slot, 0, k, v)
            rounded = encode(r.k[1, slot], act)
            np.testing.assert_array_equal(k, rounded)
            np.testing.assert_array_equal(v, encode(r.v[1, slot], act))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_conversion_rounds_like_numpy_at_every_edge(dtype: int) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, 1e-8, 6e-8, -3e-5, 6.1e-5, 65504, 65519, 65520, 1e30]
    ties = [1 + i / 4096 for i in range(64)] + [2.0**-24 * (i + 0.5) for i in range(16)]
    values = np.zeros(128, np.float32)
    values[: len(special) + len(ties)] = special + ties
    with np.errstate(over="ignore"), rig([1], act_dtype=F32, kv_dtype=dtype) as r:
        row = values.reshape(1, 2, 64)
        r.cache.store_span(0, 0, 0, row, row)
        k, v = np.zeros_like(row), np.zeros_like(row)
        r.cache.load_span(0, 0, 0, k, v)
        np.testing.assert_array_equal(k, decode(encode(row, dtype), dtype).astype(np.float32))


def test_rows_land_where_a_span_would_put_them() -> None:
    with rig([40, 40, 40]) as r:
        slots = np.array([2, 0, 1], np.uint32)
        positions = np.array([39, 0, 16], np.uint32)
        k, v = (r.rng.standard_normal((3, 2, 64)).astype(np.float32) for _ in "kv")
        r.cache.store_rows(1, slots, positions, k, v)
        for i in range(3):
            got_k, got_v = (np.zeros((1, 2, 64), np.float32) for _ in "kv")
            r.cache.load_span(1, int(slots[i]), int(positions[i]), got_k, got_v)
            np.testing.assert_array_equal(got_k[0], k[i])
            np.testing.assert_array_equal(got_v[0], v[i])


def test_a_store_touches_no_other_token_layer_or_slot() -> None:
    with rig([40, 40]) as r:
        row = np.full((1, 2, 64), 9.0, np.float32)
        r.cache.store_rows(1, np.array([0], np.uint32), np.array([17], np.uint32), row, row)
        for layer, slot in r.k:
            k, v = (np.zeros((40, 2, 64), np.float32) for _ in "kv")
            r.cache.load_span(layer, slot, 0, k, v)
            changed = (k != r.k[layer, slot].astype(np.float32)).any(axis=(1, 2))
            assert changed.nonzero()[0].tolist() == ([17] if (layer, slot) == (1, 0) else [])


@pytest.mark.parametrize(
    ("layer", "slot", "position", "message"),
    [
        (2, 0, 0, "layer is 2; it must be below n_layers, 2"),
        (0, 8, 0, "slot is 8; it must be below max_slots, 8"),
        (0, 0, 768, "position is 768; it must be below max_pages [*] page_size, 768"),
        (0, 1, 0, "page is 999; it must be below n_pages, 256"),
    ],
)
def test_an_index_out_of_range_is_named_and_nothing_is_written(
    layer: int, slot: int, position: int, message: str
) -> None:
    with rig([40]) as r:
        r.sequences.page_table[1, 0] = 999
        rows = np.full((2, 2, 64), 5.0, np.float32)
        slots = np.array([0, slot], np.uint32)
        positions = np.array([0, position], np.uint32)
        with pytest.raises(IndexError, match=message):
            r.cache.store_rows(layer, slots, positions, rows, rows)
        k, v = (np.zeros((1, 2, 64), np.float32) for _ in "kv")
        r.cache.load_span(0, 0, 0, k, v)
        np.testing.assert_array_equal(k, r.k[0, 0][:1].astype(np.float32))


@pytest.mark.parametrize("kind", ["shape", "dtype", "order", "index"])
def test_arrays_that_do_not_fit_are_refused(kind: str) -> None:
    k = np.zeros((4, 2, 64), np.float32)
    index = np.zeros(4, np.uint32)
    with rig([40]) as r, pytest.raises(ValueError, match=r"must|fit"):
        r.cache.store_rows(
            0,
            index.astype(np.int64) if kind == "index" else index,
            index,
            {"shape": k[:, :1], "dtype": k.astype(np.int32), "order": k[:, :, ::-1]}.get(kind, k),
            k,
        )


def test_a_read_only_target_is_refused() -> None:
    k = np.zeros((4, 2, 64), np.float32)
    k.flags.writeable = False
    with rig([40]) as r, pytest.raises(ValueError, match="k must be writable"):
        r.cache.load_span(0, 0, 0, k, k)


def test_a_geometry_without_pages_has_an_empty_cache() -> None:
    with rig([], n_pages=0) as r:
        assert nn.segment_bytes(r.geo, nn.SegmentKind.CPU_CACHE) == 4096
