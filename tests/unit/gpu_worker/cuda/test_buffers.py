"""Buffers before the first plan, and their sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.cuda.buckets import MIXED_ROWS, mixed_splits
from gpu_worker.cuda.buffers import MAX_SPLITS, SPLIT_ROWS, Buffers, n_splits
from gpu_worker.cuda.plan import PAD_TOKENS, MetaLayout
from gpu_worker.plan_check import PlanLimits
from protos.config import DType
from protos.model_config import ModelConfig

CPU = torch.device("cpu")
LIMITS = PlanLimits(
    max_rows=8, max_tokens=40, max_swaps=8, max_slots=8, block_size=16, max_blocks=8,
    num_blocks=8, page_size=16, max_pages=8, num_pages=8, max_positions=128, vocab_size=32,
)  # fmt: skip


def config(kv_heads: int = 2) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=2 * kv_heads, num_key_value_heads=kv_heads,
        head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=128, tie_word_embeddings=False, dtype=DType.FLOAT32,
        bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


@pytest.mark.parametrize("two_batches", [False, True])
def test_launches_before_the_first_plan_touch_no_cache(two_batches: bool) -> None:
    layout = MetaLayout(LIMITS)
    made = Buffers(config(), LIMITS, layout, torch.float32, CPU, two_batches)
    assert len(made.channels) == 1 + two_batches
    for channel in made.channels:
        np.testing.assert_array_equal(channel.meta[: layout.tables_at].numpy(), layout.blank)
        for name in ("cache_slots", "pages", "q_rows", "tile_rows"):
            assert (channel.fields[name] == -1).all(), name


def test_outcomes_of_channels_do_not_overlap() -> None:
    made = Buffers(config(), LIMITS, MetaLayout(LIMITS), torch.float32, CPU, True)
    assert made.rows == LIMITS.max_rows + PAD_TOKENS
    for channel in range(2):
        made.tokens_out(channel).fill_(10 + channel)
        made.logprobs_out(channel).fill_(-0.5 - channel)
        made.voided(channel).fill_(channel + 1)
        made.waited_ns(channel).fill_((channel + 1) << 40)
    for channel in range(2):
        assert (made.tokens_out(channel) == 10 + channel).all()
        assert (made.logprobs_out(channel) == -0.5 - channel).all()
        assert made.voided(channel).tolist() == [channel + 1]
        assert made.waited_ns(channel).tolist() == [(channel + 1) << 40]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_few_rows_are_split_until_the_device_is_full(kv_heads: int) -> None:
    c = config(kv_heads)
    for rows in range(1, 300):
        splits = n_splits(rows, c)
        assert splits & (splits - 1) == 0
        assert splits == 1 or splits * rows * kv_heads <= SPLIT_ROWS
        assert splits == MAX_SPLITS or 2 * splits * rows * kv_heads > SPLIT_ROWS
        assert rows * splits * c.num_attention_heads <= Buffers.split_parts(c, 300)


@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_splits_beside_prefills_have_room_with_few_rows_too(kv_heads: int) -> None:
    c = config(kv_heads)
    for rows in (1, 64, 65, 256):
        held = next(held for held, _ in MIXED_ROWS if rows <= held)
        needed = held * mixed_splits(rows) * c.num_attention_heads
        assert needed <= Buffers.split_parts(c, 1)
