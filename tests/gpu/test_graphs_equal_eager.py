"""Captured graphs, the same launches one by one, and plain PyTorch choose the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.placements import FEW_GRAPHS, ROOMY, check_greedy_tokens
from tests.helpers.reference import Reference


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model, "cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="graphs"),
        pytest.param(("--enforce-eager",), id="one by one"),
        pytest.param(("--kernel-backend", "torch"), id="plain PyTorch"),
        pytest.param(("--max-num-seqs", "4"), id="few rows"),
    ],
)
def test_greedy_tokens_equal_transformers_however_plans_run(
    arguments: tuple[str, ...], demo_model: Path, reference: Reference, tmp_path: Path
) -> None:
    check_greedy_tokens(
        *(demo_model, tmp_path, reference, "mixed", (*ROOMY, *FEW_GRAPHS, *arguments)),
        device="cuda",
    )
