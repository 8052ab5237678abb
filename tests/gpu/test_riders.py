"""Riders on the device: graphs with the riders' branch, the same one by one, and transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.prompts import PROMPTS
from tests.helpers.placements import FEW_GRAPHS, ROOMY
from tests.helpers.reference import Reference
from tests.helpers.server import request_of, running_server

NEW_TOKENS = 24
FLAGS = ("--max-model-len", "1024", *ROOMY, *FEW_GRAPHS)


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model, "cuda")


@pytest.mark.parametrize("eager", [(), ("--enforce-eager",)], ids=["graphs", "one by one"])
@pytest.mark.parametrize(
    "policy",
    [
        "piggyback",
        "neo_server.policies.piggyback:beside_gpu",
        "tests.helpers.policies:ride_churn",
    ],
)
def test_tokens_of_riders_equal_transformers_on_cuda(
    policy: str, eager: tuple[str, ...], demo_model: Path, reference: Reference, tmp_path: Path
) -> None:
    flags = ("--scheduling-policy", policy, "--dtype", "float32", *FLAGS, *eager)
    with running_server(demo_model, tmp_path, *flags, device="cuda") as server:
        results = server.generate_all([request_of(prompt, NEW_TOKENS) for prompt in PROMPTS])
        loads = server.loads()
        server.assert_caches_end_empty()
    assert loads.iterations["piggyback"] > 30
    assert loads.num_cpu_decodes > 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result.token_ids) == NEW_TOKENS
        prompt_ids = reference.encode(prompt)
        assert reference.first_difference(prompt_ids, result.token_ids) is None, prompt
