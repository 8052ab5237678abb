"""Sizes of the shared segments, derived from the engine's and the model's configuration."""

from __future__ import annotations

from neo_native import WireDType
from neo_server.errors import ConfigurationError
from protos.config import CacheConfig, DType, EngineConfig
from protos.model_config import ModelConfig

_GIB = 1 << 30
PLANS_IN_FLIGHT = 3  # at most; Scheduler.wants_plan says when
SPARE_WORKERS = 16  # rows of the worker table beyond those that the server starts itself
# Tasks beyond one per row and KV head, so that a few long sequences can be split over all threads.
_SPLIT_TASKS = 1024


def cpu_page_bytes(cache: CacheConfig, model: ModelConfig, dtype: DType) -> int:
    """Bytes of one page of the CPU-cache over all layers; ``dtype`` is the activations'."""
    row = cache.cpu_kv_cache_dtype.resolve(dtype).row_bytes(model.head_dim)
    rows = 2 * model.num_hidden_layers * model.num_key_value_heads  # K and V
    return cache.cpu_kv_page_size * rows * row


def num_cpu_pages(cache: CacheConfig, model: ModelConfig, dtype: DType) -> int:
    """Pages of the CPU-cache that ``kv_offloading_size`` pays for; each holds all layers."""
    return int(cache.kv_offloading_size * _GIB) // cpu_page_bytes(cache, model, dtype)


def geometry_fields(config: EngineConfig, model: ModelConfig, max_workers: int) -> dict[str, int]:
    """Fields of ``Geometry`` (protos/wire.hpp) for one rank."""
    cache, scheduler, worker = config.cache, config.scheduler, config.worker
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigurationError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}; it must be at least "
            f"max_num_seqs, {scheduler.max_num_seqs}: every sequence decodes in every iteration"
        )
    if scheduler.max_model_len > model.max_position_embeddings:
        raise ConfigurationError(
            f"max_model_len is {scheduler.max_model_len}; the model's max_position_embeddings is "
            f"{model.max_position_embeddings}"
        )
    return {
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "act_dtype": WireDType[worker.dtype.name],
        "kv_dtype": WireDType[cache.cpu_kv_cache_dtype.resolve(worker.dtype).name],
        "block_size": cache.block_size,
        "page_size": cache.cpu_kv_page_size,
        # One page at least: the gpu worker times copies to and from it, whoever uses it later.
        "n_pages": max(num_cpu_pages(cache, model, worker.dtype), 1),
        "max_slots": scheduler.max_num_seqs,
        "max_rows": scheduler.max_num_seqs,
        "max_tokens": scheduler.max_num_batched_tokens,
        "max_blocks": -(-scheduler.max_model_len // cache.block_size),
        "max_pages": -(-scheduler.max_model_len // cache.cpu_kv_page_size),
        "max_tasks": scheduler.max_num_seqs * model.num_key_value_heads + _SPLIT_TASKS,
        "max_swaps": scheduler.max_num_seqs,
        "n_plans": PLANS_IN_FLIGHT,
        "max_workers": max_workers,
        "rank": 0,
        "world_size": 1,
        "spin_us": worker.spin_us,
        "lease_us": worker.lease_us,
        "max_logprobs": scheduler.max_logprobs,
        "ride_groups": model.num_hidden_layers + 1 if scheduler.ride_capacity else 0,
        "ride_capacity": scheduler.ride_capacity,
    }
