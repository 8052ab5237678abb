"""Placements that force every path of a token, and the check of what came out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.prompts import PROMPTS
from tests.helpers.reference import Reference
from tests.helpers.server import RunningServer, request_of, running_server

NEW_TOKENS = 64
ROOMY = ("--num-gpu-blocks-override", "1024", "--kv-offloading-size", "1")
# A cache for a few of the prompts: the rest is moved, or preempted, in mid-generation.
TIGHT = ("--num-gpu-blocks-override", "96", "--kv-offloading-size", "0.1")
# On CUDA every server captures its graphs; as many rows as there are prompts need a third of them.
FEW_GRAPHS = ("--max-num-seqs", "32")
CHURN = "tests.helpers.policies:churn"

PLACEMENTS = [
    pytest.param("gpu-only", ROOMY, id="every request a GPU-request"),
    pytest.param("simple-offload", ROOMY, id="every decode on the cpu workers"),
    pytest.param("mixed", ROOMY, id="a mix"),
    pytest.param("symmetric", ROOMY, id="two halves, every decode on the cpu workers"),
    pytest.param("fastdecode-plus", ROOMY, id="two batches, every decode on the cpu workers"),
    pytest.param("neo", TIGHT, id="neo with a small GPU-cache"),
    pytest.param("gpu-only", TIGHT, id="recompute preemption"),
    pytest.param(CHURN, ROOMY, id="forced swap-outs, swap-ins and preemptions"),
    pytest.param("mixed", (*ROOMY, "--max-num-batched-tokens", "96"), id="chunked prefill"),
]


def check_greedy_tokens(
    model: Path,
    folder: Path,
    reference: Reference,
    policy: str,
    arguments: tuple[str, ...],
    device: str = "cpu",
    more: tuple[str, ...] = (),
) -> None:
    """All prompts at once under one policy: every token is the one transformers chooses.

    ``more``: flags that change nothing of where requests run.
    """
    flags = ("--scheduling-policy", policy, "--max-model-len", "1024", *more, *arguments)
    with running_server(model, folder, "--dtype", "float32", *flags, device=device) as server:
        results = server.generate_all([request_of(prompt, NEW_TOKENS) for prompt in PROMPTS])
        _check_placement(policy, arguments, server)
        server.assert_caches_end_empty()
    for prompt, result in zip(PROMPTS, results, strict=True):
        prompt_ids = reference.encode(prompt)
        assert result.num_prompt_tokens == len(prompt_ids)
        assert len(result.token_ids) == NEW_TOKENS
        assert reference.first_difference(prompt_ids, result.token_ids) is None, prompt
        assert result.text == reference.tokenizer.decode(
            result.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _check_placement(policy: str, arguments: tuple[str, ...], server: RunningServer) -> None:
    """The run did what its name says; otherwise equality proves nothing."""
    loads = server.loads()
    if policy == "gpu-only":
        assert loads.num_gpu_decodes > 0
        assert loads.num_cpu_decodes == 0
        assert (loads.num_preemptions > 0) == (arguments == TIGHT)
    elif policy in ("simple-offload", "symmetric", "fastdecode-plus"):
        assert loads.num_gpu_decodes == 0
        assert loads.num_cpu_decodes > 0
    else:
        assert loads.num_gpu_decodes > 0
        # neo offloads only where its cost model says that it pays, which depends on the machine.
        assert loads.num_cpu_decodes > 0 or policy == "neo"
    if policy == CHURN:
        assert min(loads.num_swap_outs, loads.num_swap_ins, loads.num_preemptions) > 0
    if policy == "neo":
        assert loads.num_swap_outs + loads.num_preemptions > 0
