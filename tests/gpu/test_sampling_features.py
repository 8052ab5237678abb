"""What requests may ask for beside tokens, with the gpu worker on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protos import inference_pb2 as pb
from tests.e2e.test_piggyback import BESIDE_GPU
from tests.e2e.test_sampling_features import (
    PROMPT,
    TOKENS,
    logprobs_after,
    test_a_seed_reproduces_and_a_tiny_temperature_is_greedy,
    test_logit_bias_is_added_and_a_large_one_decides,
    test_min_tokens_holds_back_every_stop_token,
    test_n_completions_interleave_and_equal_single_ones_of_their_seeds,
    test_penalties_are_those_of_vllms_documentation,
)
from tests.helpers.reference import Reference
from tests.helpers.server import RunningServer, request_of, running_server

__all__ = [
    "test_a_seed_reproduces_and_a_tiny_temperature_is_greedy",
    "test_logit_bias_is_added_and_a_large_one_decides",
    "test_min_tokens_holds_back_every_stop_token",
    "test_n_completions_interleave_and_equal_single_ones_of_their_seeds",
    "test_penalties_are_those_of_vllms_documentation",
]

TOLERANCE = 2e-3


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


def check(entry: pb.TokenLogprobs, row: torch.Tensor, token: int, n_top: int) -> None:
    """Ranks of unlikely tokens, among thousands of nearly equal ones, may differ a little."""
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
    assert entry.rank == pytest.approx(int((row > row[token]).sum()) + 1, rel=0.01, abs=1)
    assert len(entry.top) == n_top
    for place, top in enumerate(entry.top):
        assert top.logprob == pytest.approx(float(row[top.token_id]), abs=TOLERANCE)
        assert top.logprob == pytest.approx(float(row.topk(n_top).values[place]), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_log_softmax_of_transformers(
    server: RunningServer, reference: Reference, temperature: float
) -> None:
    prompt = reference.encode(PROMPT * 12)
    requests = []
    for n_top, n_prompt in ((5, 3), (0, 0)):
        request = request_of(prompt, TOKENS, temperature=temperature, seed=3)
        request.response_options.logprobs = n_top
        request.response_options.prompt_logprobs = n_prompt
        requests.append(request)
    for request, result in zip(requests, server.generate_all(requests), strict=True):
        options = request.response_options
        rows = logprobs_after(reference, prompt + result.token_ids)
        for position, entry in enumerate(result.prompt_logprobs[1:], 1):
            check(entry, rows[position - 1], prompt[position], options.prompt_logprobs)
        assert len(result.prompt_logprobs) == len(prompt)
        for i, entry in enumerate(result.logprobs):
            check(entry, rows[len(prompt) + i - 1], result.token_ids[i], options.logprobs)
        assert len(result.logprobs) == TOKENS
    server.assert_caches_end_empty()
