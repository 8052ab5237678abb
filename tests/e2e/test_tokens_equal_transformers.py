"""Greedy tokens equal Hugging Face transformers in fp32, wherever attention runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.prompts import PROMPTS
from tests.helpers.placements import NEW_TOKENS, PLACEMENTS, check_greedy_tokens
from tests.helpers.reference import Reference
from tests.helpers.server import request_of, running_server


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


@pytest.mark.parametrize(("policy", "arguments"), PLACEMENTS)
def test_greedy_tokens_equal_transformers(
    policy: str,
    arguments: tuple[str, ...],
    demo_model: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    check_greedy_tokens(demo_model, tmp_path, reference, policy, arguments)


@pytest.mark.soak
def test_greedy_tokens_equal_those_that_transformers_generates_one_by_one(
    demo_model: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference.generate(reference.encode(p), NEW_TOKENS) for p in PROMPTS]
    for parameters in PLACEMENTS:
        policy, arguments = parameters.values
        flags = ("--scheduling-policy", policy, "--max-model-len", "1024", *arguments)
        with running_server(demo_model, tmp_path, *flags) as server:
            results = server.generate_all([request_of(p, NEW_TOKENS) for p in PROMPTS])
            assert [result.token_ids for result in results] == expected, parameters.id
            server.assert_caches_end_empty()
