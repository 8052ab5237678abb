from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.errors import CacheSizeError
from gpu_worker.kv_pool import (
    CPU_DEFAULT_BYTES,
    GpuCache,
    activation_bytes,
    block_bytes,
    num_gpu_blocks,
)
from protos.config import CacheConfig, SchedulerConfig
from protos.model_config import ModelConfig, parse_model_config
from tests.helpers.tiny_llama import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path)
    return ModelConfig.from_pretrained(path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_gpu_blocks_override": 7, "kv_cache_memory_bytes": 1 << 30}, 7),
        ({"kv_cache_memory_bytes": 5 * 12288 + 1}, 5),  # 3 layers x 2 x 2 heads x 16 x 16 x fp32
        ({}, CPU_DEFAULT_BYTES // 12288),
    ],
)
def test_the_first_size_that_is_given_counts(
    config: ModelConfig, fields: dict[str, Any], expected: int
) -> None:
    assert block_bytes(config, 16, 4) == 12288
    found = num_gpu_blocks(config, CacheConfig(**fields), SchedulerConfig(), 4, CPU)
    assert found == expected


def test_less_than_one_block_is_refused_with_both_numbers(config: ModelConfig) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=12287)
    with pytest.raises(CacheSizeError, match=r"kv_cache_memory_bytes leaves 12287 .* needs 12288"):
        num_gpu_blocks(config, cache, SchedulerConfig(), 4, CPU)


def test_what_cannot_be_allocated_is_a_named_error(config: ModelConfig) -> None:
    with pytest.raises(CacheSizeError, match=r"GPU-cache of 1000000000000 blocks"):
        GpuCache(config, 10**12, 16, torch.float32, CPU)


def test_a_flat_index_is_block_times_block_size_plus_offset(config: ModelConfig) -> None:
    cache = GpuCache(config, 4, 16, torch.float32, CPU)
    k, v = torch.randn(2, 3, 2, 16).unbind(0)
    index = torch.tensor([3 * 16 + 15, 0, 16])
    cache.store(1, index, k, v)
    k_blocks, v_blocks = cache.layer(1)
    assert torch.equal(k_blocks[3, 15], k[0])
    assert torch.equal(v_blocks[1, 0], v[2])
    assert all(map(torch.equal, cache.load(1, index), (k, v)))
    assert cache.blocks[[0, 2]].abs().sum() == 0


def test_a_stored_value_that_is_not_finite_reaches_no_later_owner_of_the_block(
    config: ModelConfig,
) -> None:
    cache = GpuCache(config, 2, 16, torch.float32, CPU)
    bad = torch.full((1, config.num_key_value_heads, config.head_dim), torch.inf)
    cache.store(0, torch.tensor([5]), bad, -bad * 0)
    assert torch.isfinite(cache.blocks).all()


def test_the_longest_context_leaves_room_for_a_cache() -> None:
    """Llama-3.1-8B with its own context of 131,072 tokens beside 80 GiB."""
    llama = parse_model_config(
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "dtype": "bfloat16",
        },
        {},
    )
    scheduler = SchedulerConfig(max_model_len=131072)
    assert activation_bytes(llama, scheduler, 2) < 6 << 30
