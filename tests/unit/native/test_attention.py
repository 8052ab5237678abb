from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import BF16, F16, F32, decode, rig, tolerance

VARIANTS = nn.isa_variants()
DTYPES = {"fp32": F32, "fp16": F16, "bf16": BF16}


def worst_error(isa: str, tokens: list[int], n_splits: int = 1, **changes: int) -> float:
    with rig(tokens, max_pages=max(tokens) // 8 + 1, n_pages=512, **changes) as r:
        slots = np.arange(len(tokens), dtype=np.uint32)
        lens = np.array(tokens, np.uint32)
        q = r.queries(len(tokens))
        out = decode(nn.attend(q, r.cache, 1, slots, lens, isa, n_splits), r.dim("act_dtype"))
        return float(np.abs(out - r.expected(1, q, slots, lens)).max())


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_every_head_dim_and_dtype_equals_the_float64_reference(
    isa: str, dtype: int, head_dim: int
) -> None:
    changes = {"head_dim": head_dim, "act_dtype": dtype, "kv_dtype": dtype}
    assert worst_error(isa, [1, 15, 16, 17, 150], **changes) < tolerance(dtype)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size_equals_the_float64_reference(isa: str, group: int) -> None:
    error = worst_error(isa, [33, 97], n_heads=2 * group, act_dtype=F32, kv_dtype=F16)
    assert error < tolerance(F32)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("page_size", [8, 24, 31, 32, 64, 100, 256])
def test_every_page_size_equals_the_float64_reference(isa: str, page_size: int) -> None:
    error = worst_error(isa, [1, 7, 100, 257, 300], page_size=page_size, kv_dtype=BF16)
    assert error < tolerance(F32)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("n_splits", [2, 3, 7])
def test_merged_splits_equal_the_whole(isa: str, n_splits: int) -> None:
    assert worst_error(isa, [120, 333], n_splits) < tolerance(F32)


@pytest.mark.parametrize("isa", VARIANTS)
def test_scores_far_apart_neither_overflow_nor_vanish(isa: str) -> None:
    """One key that dominates by thousands, first, in the middle and last."""
    for hot in (0, 20, 39):
        with rig([40]) as r:
            k = np.zeros((40, 2, 64), np.float32)
            k[:hot], k[hot + 1 :] = -30.0, 30.0
            k[hot] = 2000.0
            v = r.rng.standard_normal((40, 2, 64)).astype(np.float32)
            r.cache.store_span(0, 0, 0, k, v)
            q = np.ones((1, 8, 64), np.float32)
            out = nn.attend(q, r.cache, 0, np.zeros(1, np.uint32), np.full(1, 40, np.uint32), isa)
            np.testing.assert_array_equal(out[0].reshape(2, 4, 64), v[hot][:, None].repeat(4, 1))


def test_the_best_variant_is_first_and_scalar_always_runs() -> None:
    assert VARIANTS[-1] == "scalar"
    order = ["avx512_bf16", "avx512", "avx2", "scalar"]
    assert [name for name in order if name in VARIANTS] == VARIANTS


def active_isa_under(value: str) -> subprocess.CompletedProcess[str]:
    code = "import neo_native as nn; print(nn.active_isa())"
    env = {"NEO_CPU_ISA": value, "PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("isa", VARIANTS)
def test_the_environment_forces_a_variant(isa: str) -> None:
    assert active_isa_under(isa).stdout.strip() == isa


def test_an_unknown_forced_variant_fails_loudly() -> None:
    failed = active_isa_under("avx1024")
    assert failed.returncode != 0
    assert "NEO_CPU_ISA is avx1024; it must be auto or one of" in failed.stderr


@pytest.mark.parametrize(
    ("slot", "seq_len", "layer", "n_splits"),
    [(8, 5, 0, 1), (0, 10_000, 0, 1), (0, 5, 2, 1), (0, 5, 0, 2), (0, 0, 0, 1), (0, 5, 0, 0)],
)
def test_rows_that_do_not_fit_are_refused(
    slot: int, seq_len: int, layer: int, n_splits: int
) -> None:
    with rig([5]) as r:
        q, slots, lens = r.queries(1), np.array([slot], np.uint32), np.array([seq_len], np.uint32)
        with pytest.raises((IndexError, ValueError), match="n_splits"):
            nn.attend(q, r.cache, layer, slots, lens, "auto", n_splits)
