"""Attention on the device, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# What decode attention on a CPU gathers at a time, of K and of V. Larger buffers cost more in page
# faults than in arithmetic: 32 rows of 512 tokens took 24 to 32 ms a layer gathered at once and
# 8.5 ms in parts of this size (135M model, fp32, one thread of a busy Zen 4).
GATHER_BYTES = 2 << 20
# The same on CUDA, and what the scores of a later chunk may take: bounds on memory, not on speed.
CUDA_GATHER_BYTES = 256 << 20
SCORE_BYTES = 256 << 20


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Causal attention of one sequence's new tokens.

    ``q``: [new, heads, head_dim]; ``k``, ``v``: [length, kv_heads, head_dim] with the new tokens
    last. ``mask``: bool [new, length], true where a query sees a key; None when new == length.
    Returns [new, heads, head_dim].
    """
    if mask is None:
        return _prefill_part(q, k, v, None, scale)
    # With a mask PyTorch may hold all scores at once, so queries are taken in parts.
    step = max(1, SCORE_BYTES // (q.shape[1] * len(k) * 4))
    parts = zip(torch.split(q, step), torch.split(mask, step), strict=True)
    return torch.cat([_prefill_part(queries, k, v, seen, scale) for queries, seen in parts])


def _prefill_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def decode_attention(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """One new token per row over its blocks of the GPU-cache.

    ``q``: [rows, heads, head_dim]; ``k_blocks``, ``v_blocks``: [blocks, block_size, kv_heads,
    head_dim] of one layer; ``block_table``: int64 [rows, columns]; ``mask``: bool
    [rows, 1, 1, columns * block_size], true for tokens that exist. Returns [rows, heads, head_dim].

    The query heads of one KV head are taken as its query positions: they share K and V, and no
    mask sets them apart, so no head of K or V is repeated.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    row_bytes = block_table.shape[1] * k_blocks[0].numel() * k_blocks.element_size()
    step = max(1, (CUDA_GATHER_BYTES if q.is_cuda else GATHER_BYTES) // row_bytes)
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        out[part] = _decode_rows(q[part], k_blocks, v_blocks, block_table[part], mask[part], scale)
    return out


def _decode_rows(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, mask: Tensor, scale: float
) -> Tensor:
    rows, heads, head_dim = q.shape
    kv_heads = k_blocks.shape[2]
    padded = (rows, -1, kv_heads, head_dim)
    columns = block_table.flatten()
    k = k_blocks.index_select(0, columns).view(padded).transpose(1, 2)
    v = v_blocks.index_select(0, columns).view(padded).transpose(1, 2)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, head_dim)
