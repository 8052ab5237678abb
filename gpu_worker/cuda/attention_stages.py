"""Attention on the device as launches on static buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from gpu_worker.cuda import attention
from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.buffers import Buffers, ChannelBuffers, n_splits
from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.plan import TILE_Q
from gpu_worker.cuda.tiles import decode_tiles, prefill_tiles
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel


class AttentionStages:
    """Launches on the current stream; none of them waits for the host."""

    def __init__(
        self,
        model: LlamaModel,
        cache: GpuCache,
        buffers: Buffers,
        exchange: DeviceExchange | None,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self.exchange = exchange
        self.cache = cache
        self._loads = exchange.chunk_loads(buffers.staging) if exchange else None
        self._config = c = model.config
        self._scale = c.attention_scale * math.log2(math.e)
        self._dim_pad = max(16, triton.next_power_of_2(c.head_dim))
        group = c.num_attention_heads // c.num_key_value_heads
        # The table of staging: one block, as long as the staging itself.
        self._one_block = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._group = {"GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group))}

    def _channel(self, s: Shape) -> ChannelBuffers:
        return self.buffers.channels[s.channel]

    def attend(self, s: Shape, layer: int) -> None:
        """Attention on the device, into ``attn``."""
        kv = self.cache.blocks[layer]
        if s.tiles:
            tables = self._channel(s).fields["tables"]
            self._prefill(s, kv, tables, 0, s.tiles, self.cache.block_size)
        for chunk in s.cpu_chunks:
            self._staged_prefill(s, chunk.tile_first, chunk.tile_count)
        if s.chunk_tiles:
            self._staged_prefill(s, 0, s.chunk_tiles)
        if s.gpu_rows:
            self.decode_attention(s, kv)

    def decode_attention(self, s: Shape, kv: Tensor) -> None:
        """The decode_gpu rows of a batch over their blocks. ``kv``: one layer of the GPU-cache."""
        c, f, cfg, b = self._channel(s), self._channel(s).fields, self._config, self.buffers
        splits = s.splits or n_splits(s.gpu_rows, cfg)
        tile, warps, stages = decode_tiles(
            s.gpu_rows * cfg.num_key_value_heads, splits, self._dim_pad, kv.itemsize
        )
        shape = {
            "HEADS": cfg.num_attention_heads,
            "HEAD_DIM": cfg.head_dim,
            "DIM_PAD": self._dim_pad,
            "TILE": tile,
            "SPLITS": splits,
        }
        attention.decode_kernel[(s.gpu_rows, cfg.num_key_value_heads, splits)](
            c.qkv,
            kv,
            kv.stride(0),
            f["tables"],
            f["table_stride"],
            f["row_tokens"],
            f["row_lens"],
            c.attn,
            b.part_o,
            b.part_ml,
            self._scale,
            KV_HEADS=cfg.num_key_value_heads,
            BLOCK_SIZE=self.cache.block_size,
            num_warps=warps,
            num_stages=stages,
            **self._group,
            **shape,
        )
        if splits > 1:
            attention.merge_splits_kernel[(s.gpu_rows, cfg.num_attention_heads)](
                b.part_o, b.part_ml, f["row_tokens"], f["row_lens"], c.attn, num_warps=1, **shape
            )

    def _prefill(
        self,
        s: Shape,
        kv: Tensor,
        tables: Tensor,
        first: int,
        tiles: int,
        block_size: int,
        kind: str = "",
    ) -> None:
        """``tiles`` of prefill attention from ``first`` on; ``kv``: [2][block][..] of one layer.

        ``kind``: ``chunk_`` for the tiles of later chunks of CPU prefills.
        """
        c, f, cfg = self._channel(s), self._channel(s).fields, self._config
        tile, warps, stages = prefill_tiles(self._dim_pad, c.qkv.itemsize)
        attention.prefill_kernel[(tiles, cfg.num_attention_heads)](
            c.qkv,
            kv,
            kv.stride(0),
            tables,
            f["table_stride"],
            c.attn,
            self._scale,
            f[f"{kind}tile_rows"][first:],
            f[f"{kind}tile_firsts"][first:],
            f["prefill_tokens"],
            f["prefill_news"],
            f["prefill_starts"],
            f["prefill_tables"],
            HEADS=cfg.num_attention_heads,
            KV_HEADS=cfg.num_key_value_heads,
            HEAD_DIM=cfg.head_dim,
            DIM_PAD=self._dim_pad,
            BLOCK_SIZE=block_size,
            TILE_Q=TILE_Q,
            TILE=tile,
            num_warps=warps,
            num_stages=stages,
        )

    def begin_chunks(self, shapes: Sequence[Shape], layers: int) -> None:
        """Starts to load what later chunks of CPU prefills attend over."""
        if self._loads is None:
            return
        self._loads.begin([chunk for s in shapes for chunk in s.cpu_chunks], layers)
        for s in shapes:
            if s.chunk_tiles:  # of one batch at most
                ints = self._channel(s).fields["chunk"]
                self._loads.begin_open(self.buffers.chunk.on(ints), layers)

    def _staged_prefill(self, s: Shape, first: int, tiles: int) -> None:
        """Attention of a later chunk of a CPU prefill; its earlier tokens come through staging."""
        assert self._loads is not None
        kv = self._loads.take()
        self._prefill(s, kv, self._one_block, first, tiles, kv.shape[2], "chunk_")
        self._loads.done()
