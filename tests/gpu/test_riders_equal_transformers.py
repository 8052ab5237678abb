"""Riders with the gpu worker on CUDA: in its graphs, and launched one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_piggyback import BESIDE_GPU, RIDE_CHURN, check_tokens_of_riders
from tests.helpers.reference import Reference


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model, "cuda")


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        pytest.param("piggyback", (), id="nothing but riders"),
        pytest.param(BESIDE_GPU, (), id="beside GPU-requests"),
        pytest.param(RIDE_CHURN, (), id="with moves and preemptions"),
        pytest.param(BESIDE_GPU, ("--enforce-eager",), id="one by one"),
    ],
)
def test_tokens_of_riders_equal_transformers_on_cuda(
    policy: str,
    arguments: tuple[str, ...],
    demo_model: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    few = ("--max-num-seqs", "16", "--no-profile")  # fewer graphs: a quicker start
    check_tokens_of_riders(
        policy, demo_model, reference, tmp_path, (*few, *arguments), device="cuda"
    )
