"""Riders that come and go one after the other, with the gpu worker on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_piggyback import BESIDE_GPU, RIDE_CHURN, check_tokens_of_riders
from tests.helpers.reference import Reference


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model, "cuda")


@pytest.mark.parametrize("policy", [BESIDE_GPU, RIDE_CHURN])
def test_tokens_of_riders_that_join_leave_and_move_equal_transformers_on_cuda(
    policy: str, demo_model: Path, reference: Reference, tmp_path: Path
) -> None:
    few = ("--max-num-seqs", "16", "--no-profile")  # fewer graphs: a quicker start
    check_tokens_of_riders(policy, demo_model, reference, tmp_path, few, device="cuda")
