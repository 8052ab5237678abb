"""What requests may ask for beside tokens, with the gpu worker on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_piggyback import BESIDE_GPU
from tests.e2e.test_sampling_features import (
    check_logprobs,
    test_a_seed_reproduces_and_a_tiny_temperature_is_greedy,
    test_logit_bias_is_added_and_a_large_one_decides,
    test_min_tokens_holds_back_every_stop_token,
    test_n_completions_interleave_and_equal_single_ones_of_their_seeds,
    test_penalties_are_those_of_vllms_documentation,
)
from tests.helpers.reference import Reference
from tests.helpers.server import RunningServer, running_server

__all__ = [
    "test_a_seed_reproduces_and_a_tiny_temperature_is_greedy",
    "test_logit_bias_is_added_and_a_large_one_decides",
    "test_min_tokens_holds_back_every_stop_token",
    "test_n_completions_interleave_and_equal_single_ones_of_their_seeds",
    "test_penalties_are_those_of_vllms_documentation",
]


@pytest.fixture(scope="module", params=["gpu-only", "mixed", BESIDE_GPU])
def server(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A small budget cuts prompts; each second request decodes on the cpu workers, or rides."""
    flags = ["--scheduling-policy", str(request.param), "--max-model-len", "512"]
    flags += ["--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--no-profile"]
    flags += ["--dtype", "float32", "--num-gpu-blocks-override", "512"]
    flags += ["--kv-offloading-size", "1"]
    folder = tmp_path_factory.mktemp("sampling")
    with running_server(demo_model, folder, *flags, device="cuda") as running:
        yield running


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_log_softmax_of_transformers(
    server: RunningServer, reference: Reference, temperature: float
) -> None:
    """Ranks of unlikely tokens, among thousands of nearly equal ones, may differ a little."""
    check_logprobs(server, reference, temperature, tolerance=2e-3, rank_slack=0.01)
