"""The same checks as on the CPU, with the gpu worker on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.placements import FEW_GRAPHS, PLACEMENTS, check_greedy_tokens
from tests.helpers.reference import Reference


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model, "cuda")


@pytest.mark.parametrize(("policy", "arguments"), PLACEMENTS)
def test_greedy_tokens_equal_transformers_on_cuda(
    policy: str,
    arguments: tuple[str, ...],
    demo_model: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    check_greedy_tokens(
        demo_model, tmp_path, reference, policy, arguments, device="cuda", more=FEW_GRAPHS
    )
