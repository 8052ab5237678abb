"""Logits of prefill, chunked prefill and decode against transformers, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.ops import attention
from gpu_worker.ops.rope import inverse_frequencies
from neo_native import RowKind
from protos.config import DType
from protos.model_config import ModelConfig, UnsupportedModelError
from tests.helpers.engine_rig import Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import STYLES, make_checkpoint

TOLERANCE = 3e-5  # of logits whose largest are about 6
LENGTH = 100


def random_tokens(seed: int, n: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (n,), generator=generator).tolist()


@torch.no_grad()
def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("chunks", [(60,), (1, 8, 17, 34)])
def test_prefill_in_any_chunks_then_decode(
    tmp_path: Path, style: str, chunks: tuple[int, ...]
) -> None:
    model = make_checkpoint(tmp_path, style, max_shard_size="80KB")
    tokens = random_tokens(1)
    expected = reference(model, tokens)
    rig = Rig(tmp_path, cpu_side=FakeCpuSide())
    at = 0
    for chunk in chunks:
        rig.run([Row(0, RowKind.PREFILL_GPU, at, tokens[at : at + chunk])])
        at += chunk
        torch.testing.assert_close(rig.logits[0][0], expected[at - 1], atol=TOLERANCE, rtol=0)
    for position in range(at, LENGTH):
        rig.run([Row(0, RowKind.DECODE_GPU, position, tokens[position : position + 1])])
        torch.testing.assert_close(rig.logits[0][0], expected[position], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("gather_bytes", [1, 20_000, 1 << 20])
def test_decodes_of_different_lengths_do_not_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather_bytes: int
) -> None:
    monkeypatch.setattr(attention, "GATHER_BYTES", gather_bytes)
    model = make_checkpoint(tmp_path, "llama3")
    prompts = [random_tokens(seed, 5 + 23 * seed) for seed in range(4)]
    rig = Rig(tmp_path, cpu_side=FakeCpuSide())
    rig.run([Row(s, RowKind.PREFILL_GPU, 0, p[:-1]) for s, p in enumerate(prompts)])
    rig.run([Row(s, RowKind.DECODE_GPU, len(p) - 1, p[-1:]) for s, p in enumerate(prompts)])
    for row, prompt in enumerate(prompts):
        expected = reference(model, prompt)[-1]
        torch.testing.assert_close(rig.logits[0][row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.FLOAT16, 0.03), (DType.BFLOAT16, 0.25)])
def test_half_precision_stays_near_fp32(tmp_path: Path, dtype: DType, tolerance: float) -> None:
    model = make_checkpoint(tmp_path, "llama3.1")
    tokens = random_tokens(3)
    rig = Rig(tmp_path, cpu_side=FakeCpuSide(), dtype=dtype)
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[:-1])])
    rig.run([Row(0, RowKind.DECODE_GPU, LENGTH - 1, tokens[-1:])])
    expected = reference(model, tokens)[-1]
    torch.testing.assert_close(rig.logits[0][0], expected, atol=tolerance, rtol=0)


def test_a_residual_beyond_float16_survives_float16_weights(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama3")
    with torch.no_grad():  # the stream passes 65,504, what fp16 holds
        model.model.embed_tokens.weight.mul_(8e4)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1.5e4)
    model.save_pretrained(tmp_path)
    tokens = random_tokens(4, 20)
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert max(float(state.abs().max()) for state in states[:-1]) > torch.finfo(torch.float16).max
    rig = Rig(tmp_path, cpu_side=FakeCpuSide(), dtype=DType.FLOAT16)
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens)])
    torch.testing.assert_close(rig.logits[0][0], reference(model, tokens)[-1], atol=0.05, rtol=0)


@pytest.mark.parametrize("style", STYLES)
def test_rope_frequencies_equal_transformers(tmp_path: Path, style: str) -> None:
    model = make_checkpoint(tmp_path, style)
    ours = inverse_frequencies(ModelConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(ours, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
    ],
)
def test_another_rope_type_is_refused_by_name(tmp_path: Path, scaling: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, "llama3", rope_scaling=scaling)
    with pytest.raises(UnsupportedModelError, match=scaling["rope_type"]):
        ModelConfig.from_pretrained(tmp_path)
