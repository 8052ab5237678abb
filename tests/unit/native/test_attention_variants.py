"""Every runnable kernel variant against the scalar one and a float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import neo_native as nn
from tests.unit.native.rig import BF16, F16, F32, Rig, attention, decode, encode, rig

INT8 = 3
VARIANTS = nn.isa_variants()
# Largest error of a row against float64 over the cache's own (rounded) K and V, relative to the
# row's largest value. float32: sums. bf16 and fp16 add the rounding of the output, 2^-9 and 2^-12;
# bf16 also that of the weights for groups above 4. int8 adds queries and weights in 8 bits.
BOUND = {F32: 2e-5, F16: 2e-3, BF16: 4e-3, INT8: 2e-2}
ACT = {F32: F32, F16: F16, BF16: BF16, INT8: BF16}
DTYPES = {"fp32": F32, "fp16": F16, "bf16": BF16, "int8": INT8}


@dataclass(frozen=True)
class Case:
    group: int
    head_dim: int
    page_size: int
    tokens: int
    dtype: int
    scale: float
    n_splits: int
    seed: int


def bound(case: Case) -> float:
    """Of the largest error. Weights of more than four heads are one bf16 term where K is bf16."""
    return BOUND[case.dtype] + (2e-3 if case.dtype == BF16 and case.group > 4 else 0.0)


def edges(page_size: int, tokens: int, near: int) -> int:
    """Moves `tokens` beside a page edge for half of the draws."""
    if near > 2:
        return tokens
    return max(1, -(-tokens // page_size) * page_size + near - 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from([8, 16, 17, 32, 64, 100, 128, 256]))
    tokens = edges(page_size, draw(st.integers(1, 700)), draw(st.integers(0, 5)))
    return Case(
        group=draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from([16, 64, 80, 96, 128, 256])),
        page_size=page_size,
        tokens=tokens,
        dtype=draw(st.sampled_from(sorted(BOUND))),
        scale=draw(st.sampled_from([1.0, 1e4, 1e-6])),
        n_splits=draw(st.integers(1, min(3, -(-tokens // page_size)))),
        seed=draw(st.integers(0, 1 << 16)),
    )


def stored(r: Rig, tokens: int) -> tuple[nn.Array, nn.Array]:
    """K and V as the cache gives them back, float64."""
    shape = (tokens, r.dim("n_kv_heads"), r.dim("head_dim"))
    act = r.dim("act_dtype")
    k, v = (encode(np.zeros(shape), act) for _ in range(2))
    r.cache.load_span(0, 0, 0, k, v)
    return decode(k, act), decode(v, act)


def poison(r: Rig, tokens: int) -> None:
    """Fills the rest of the last page with NaN, which a kernel must never let through."""
    rest = -tokens % r.dim("page_size")
    if rest == 0 or r.dim("kv_dtype") == INT8:
        return
    shape = (rest, r.dim("n_kv_heads"), r.dim("head_dim"))
    nan = encode(np.full(shape, np.nan), r.dim("act_dtype"))
    r.cache.store_span(0, 0, tokens, nan, nan)


def run_case(case: Case) -> dict[str, tuple[nn.Array, nn.Array]]:
    """Per variant: output and reference, both float64."""
    pages = -(-case.tokens // case.page_size)
    changes = {
        "n_layers": 1,
        "n_heads": case.group,
        "n_kv_heads": 1,
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "act_dtype": ACT[case.dtype],
        "kv_dtype": case.dtype,
        "max_pages": pages,
        "n_pages": pages,
        "max_slots": 1,
    }
    with rig([], seed=case.seed, **changes) as r:
        r.sequences.page_table[0, :pages] = r.rng.permutation(pages).astype(np.uint32)
        shape = (case.tokens, 1, case.head_dim)
        act = r.dim("act_dtype")
        k = encode(r.rng.standard_normal(shape), act)
        v = encode(r.rng.standard_normal(shape) * case.scale, act)
        r.cache.store_span(0, 0, 0, k, v)
        poison(r, case.tokens)
        k64, v64 = stored(r, case.tokens)
        q = r.queries(1)
        wanted = attention(decode(q, act)[0], k64, v64)
        slots, lens = np.zeros(1, np.uint32), np.full(1, case.tokens, np.uint32)
        return {
            isa: (
                decode(nn.attend(q, r.cache, 0, slots, lens, isa, case.n_splits), act)[0],
                wanted,
            )
            for isa in VARIANTS
        }


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
@given(cases())
def test_every_variant_equals_scalar_and_float64(case: Case) -> None:
    results = run_case(case)
    scalar = results["scalar"][0]
    # A value below the smallest normal of the output type is rounded to a coarser grid.
    grain = 2.0**-24 if ACT[case.dtype] == F16 else 0.0
    for isa, (out, wanted) in results.items():
        assert np.isfinite(out).all(), isa
        limit = bound(case) * np.abs(wanted).max() + grain
        assert np.abs(out - wanted).max() <= limit, isa
        assert np.abs(out - scalar).max() <= 2 * limit, isa


def relative_error(isa: str, dtype: int, group: int, tokens: int = 2000) -> float:
    """Relative L2 error, not counting the rounding of the output (which is float32)."""
    changes = {"n_heads": group, "n_kv_heads": 1, "head_dim": 128, "page_size": 64, "n_layers": 1}
    changes |= {"kv_dtype": dtype, "max_pages": 32, "n_pages": 32}
    with rig([tokens], **changes) as r:
        # Queries that bf16 holds, as a bf16 model's are.
        q = decode(encode(r.rng.standard_normal((1, group, 128)), BF16), BF16).astype(np.float32)
        slots, lens = np.zeros(1, np.uint32), np.full(1, tokens, np.uint32)
        wanted = attention(q[0].astype(np.float64), *stored(r, tokens))
        out = nn.attend(q, r.cache, 0, slots, lens, isa)[0]
        return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_the_error_of_a_long_row_is_within_the_stated_bound(
    isa: str, dtype: int, group: int
) -> None:
    bound = {F32: 1e-5, F16: 1e-5, BF16: 2e-3, INT8: 1.5e-2}[dtype]
    assert relative_error(isa, dtype, group) < bound


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_large_magnitudes_pick_the_largest_score(isa: str, dtype: int) -> None:
    changes = {"act_dtype": dtype, "kv_dtype": dtype, "n_layers": 1}
    with rig([], **changes) as r:
        r.sequences.page_table[0, :3] = [2, 0, 1]
        k = np.full((40, 2, 64), -1e4)
        k[17] = 1e4
        v = r.rng.standard_normal((40, 2, 64)) * 1e4
        stored_v = encode(v, dtype)
        r.cache.store_span(0, 0, 0, encode(k, dtype), stored_v)
        q = encode(np.full((1, 8, 64), 1e4), dtype)
        out = nn.attend(q, r.cache, 0, np.zeros(1, np.uint32), np.full(1, 40, np.uint32), isa)
        wanted = stored_v[17][:, None].repeat(4, 1)
        np.testing.assert_array_equal(out[0].reshape(2, 4, 64), wanted)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_denormal_inputs_give_a_mean_within_a_denormal(isa: str, dtype: int) -> None:
    """Scores of denormal keys are all nearly 0, so that the output is the mean of V."""
    tiny = 1e-39 if ACT[dtype] != F16 else 1e-7
    changes = {"act_dtype": ACT[dtype], "kv_dtype": dtype, "n_layers": 1}
    with rig([], **changes) as r:
        r.sequences.page_table[0, :3] = [2, 0, 1]
        k = encode(r.rng.standard_normal((37, 2, 64)) * tiny, ACT[dtype])
        v = encode(r.rng.standard_normal((37, 2, 64)) * tiny, ACT[dtype])
        r.cache.store_span(0, 0, 0, k, v)
        q = encode(r.rng.standard_normal((1, 8, 64)), ACT[dtype])
        slots, lens = np.zeros(1, np.uint32), np.full(1, 37, np.uint32)
        out = decode(nn.attend(q, r.cache, 0, slots, lens, isa), ACT[dtype])
        wanted = stored(r, 37)[1].mean(axis=0)[:, None].repeat(4, 1)
        np.testing.assert_allclose(out[0].reshape(2, 4, 64), wanted, rtol=0, atol=2 * tiny)


@pytest.mark.parametrize("isa", VARIANTS)
def test_a_long_sequence_keeps_its_sums(isa: str) -> None:
    """128k tokens of one value: the output is that value."""
    tokens = 131_072
    changes = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "page_size": 256, "kv_dtype": BF16}
    with rig([], max_pages=512, n_pages=512, **changes) as r:
        r.sequences.page_table[0, :512] = r.rng.permutation(512).astype(np.uint32)
        ones = np.ones((tokens, 1, 64), np.float32)
        r.cache.store_span(0, 0, 0, ones, ones * 1.5)
        q = r.queries(1)
        slots, lens = np.zeros(1, np.uint32), np.full(1, tokens, np.uint32)
        out = nn.attend(q, r.cache, 0, slots, lens, isa)
        np.testing.assert_allclose(out, 1.5, rtol=1e-4)
