"""The GPU-cache: paged K and V in device memory. Which block belongs to whom is the server's."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.errors import CacheSizeError
from gpu_worker.ops.attention import CUDA_GATHER_BYTES, SCORE_BYTES
from protos.config import CacheConfig, SchedulerConfig
from protos.model_config import ModelConfig

CPU_DEFAULT_BYTES = 1 << 30  # where neither a size nor a device with memory of its own is given


class GpuCache:
    """One tensor, [layer][K, V][block][block_size][kv_head][head_dim].

    A token's flat index is ``block * block_size + offset``.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        heads = (config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, *heads)
        try:
            # Zeros, since masked slots of a block are multiplied by 0, which keeps a NaN.
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise CacheSizeError(f"GPU-cache of {num_blocks} blocks: {error}") from error
        self._tokens = self.blocks.flatten(2, 3)  # [layer][2][token][kv_head][head_dim]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer by block: [block, block_size, kv_heads, head_dim] each."""
        return self.blocks[layer, 0], self.blocks[layer, 1]

    def store(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """``index``: int64 [n] flat; ``k``, ``v``: [n, kv_heads, head_dim].

        What is not finite is made so: a block's slots past its last token are read and masked, and
        0 times infinity, left there by an earlier owner, would reach another request.
        """
        self._tokens[layer, 0].index_copy_(0, index, torch.nan_to_num(k))
        self._tokens[layer, 1].index_copy_(0, index, torch.nan_to_num(v))

    def load(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """The reverse of ``store``; returns copies."""
        return (
            self._tokens[layer, 0].index_select(0, index),
            self._tokens[layer, 1].index_select(0, index),
        )


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of one block over all layers."""
    return block_size * config.kv_bytes_per_token(itemsize)


def num_gpu_blocks(
    config: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    itemsize: int,
    device: torch.device,
    activations: int | None = None,
) -> int:
    """How many blocks the configuration asks for or the device has room for.

    In this order: ``num_gpu_blocks_override``; ``kv_cache_memory_bytes``;
    ``gpu_memory_utilization`` of a CUDA device (weights must be loaded already); 1 GiB on a CPU.
    ``activations``: bytes that iterations will still allocate, where that was measured.
    Raises ``CacheSizeError`` when that is not even one block.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        source, budget = "kv_cache_memory_bytes", cache.kv_cache_memory_bytes
    elif device.type == "cuda":
        source = f"gpu_memory_utilization {cache.gpu_memory_utilization}"
        free, total = torch.cuda.mem_get_info(device)
        reserve = (
            activation_bytes(config, scheduler, itemsize) if activations is None else activations
        )
        budget = int(total * cache.gpu_memory_utilization) - (total - free) - reserve
    else:
        source, budget = "the default on a CPU", CPU_DEFAULT_BYTES
    one = block_bytes(config, cache.block_size, itemsize)
    if budget < one:
        raise CacheSizeError(
            f"{source} leaves {budget} bytes for the GPU-cache; one block needs {one}"
        )
    return budget // one


def activation_bytes(config: ModelConfig, scheduler: SchedulerConfig, itemsize: int) -> int:
    """A bound on what one iteration allocates beside the weights and the GPU-cache.

    Per token the widest point is the MLP (gate, up, their product) beside fp32 residuals and q, k,
    v; per sampled row there are fp32 logits with three copies. Attention works in parts of a fixed
    size, but one row of the longest sequence at least: gathered K and V with as much again for
    scores, or a later chunk's scores in fp32 with one copy.
    """
    per_token = (3 * config.intermediate_size + 3 * config.q_size) * itemsize
    per_token += 3 * config.hidden_size * 4
    per_row = 4 * config.vocab_size * 4
    longest = scheduler.max_model_len
    gathered = 4 * max(CUDA_GATHER_BYTES, longest * config.kv_size * itemsize)
    scores = 2 * max(SCORE_BYTES, config.num_attention_heads * longest * 4)
    chunk_kv = 4 * longest * config.kv_size * itemsize
    return (
        scheduler.max_num_batched_tokens * (per_token + longest)  # a mask is a byte a pair
        + scheduler.max_num_seqs * per_row
        + max(gathered, scores + chunk_kv)
    )
