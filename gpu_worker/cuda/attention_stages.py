"""Attention on the device as launches on static buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
from torch import Tensor

from gpu_worker.cuda import attention
from gpu_worker.cuda.buckets import Shape, mixed_splits
from gpu_worker.cuda.buffers import Buffers, ChannelBuffers, n_splits
from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.plan import TILE_Q
from gpu_worker.cuda.tiles import decode_tiles, mixed_tiles, prefill_tiles
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
        self.prefill_tiles = prefill_tiles(self._dim_pad, model.dtype.itemsize)
        self.mixed_tiles = mixed_tiles(self._dim_pad, model.dtype.itemsize)
        group = c.num_attention_heads // c.num_key_value_heads
        self._group = {"GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group))}

    def _channel(self, s: Shape) -> ChannelBuffers:
        return self.buffers.channels[s.channel]

    def attend(self, s: Shape, layer: int) -> None:
        """Attention on the device, into ``attn``."""
        kv = self.cache.blocks[layer]
        if s.tiles and s.gpu_rows and len(s.cpu_chunks) <= 1:
            self._prefills_and_decodes(s, kv)
            return
        if s.tiles:
            self._prefills(s, kv)
        if s.gpu_rows:
            self.decode_attention(s, kv)

    def decode_attention(self, s: Shape, kv: Tensor) -> None:
        """The decode_gpu rows of a batch over their blocks. ``kv``: one layer of the GPU-cache."""
        c, f, cfg, b = self._channel(s), self._channel(s).fields, self._config, self.buffers
        splits = s.splits or n_splits(s.gpu_rows, cfg)
        tile, warps, stages = decode_tiles(
            s.gpu_rows * cfg.num_key_value_heads, splits, self._dim_pad, kv.itemsize
        )
        shape = self._split(tile, splits)
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
        self._merge(s, shape)

    def _split(self, tile: int, splits: int) -> dict[str, int]:
        """What decode attention and the merge of its splits are compiled for."""
        cfg = self._config
        return {
            "HEADS": cfg.num_attention_heads,
            "HEAD_DIM": cfg.head_dim,
            "DIM_PAD": self._dim_pad,
            "TILE": tile,
            "SPLITS": splits,
        }

    def _merge(self, s: Shape, shape: dict[str, int]) -> None:
        """Where decode attention was split. ``shape``: how it was launched."""
        if shape["SPLITS"] == 1:
            return
        c, b = self._channel(s), self.buffers
        attention.merge_splits_kernel[(s.gpu_rows, self._config.num_attention_heads)](
            *(b.part_o, b.part_ml, c.fields["row_tokens"], c.fields["row_lens"], c.attn),
            num_warps=1,
            **shape,
        )

    def _prefills_and_decodes(self, s: Shape, kv: Tensor) -> None:
        """Both in one launch, of one later chunk of a CPU prefill too."""
        c, f, cfg, b = self._channel(s), self._channel(s).fields, self._config, self.buffers
        staging = kv
        if s.has_chunk:
            assert self._loads is not None
            staging = self._loads.take()
        splits = s.splits or mixed_splits(s.gpu_rows)
        tile, warps, stages = self.mixed_tiles
        shape = self._split(tile, splits)
        programs = s.tiles * cfg.num_attention_heads + s.gpu_rows * cfg.num_key_value_heads * splits
        attention.prefill_and_decode_kernel[(programs,)](
            s.tiles,
            s.gpu_rows,
            c.qkv,
            kv,
            kv.stride(0),
            f["tables"],
            f["table_stride"],
            staging,
            staging.stride(0),
            c.attn,
            self._scale,
            f["tile_rows"],
            f["tile_firsts"],
            *(f[f"prefill_{name}"] for name in ("tokens", "news", "starts", "tables")),
            f["row_tokens"],
            f["row_lens"],
            b.part_o,
            b.part_ml,
            KV_HEADS=cfg.num_key_value_heads,
            BLOCK_SIZE=self.cache.block_size,
            TILE_Q=TILE_Q,
            num_warps=warps,
            num_stages=stages,
            **self._group,
            **shape,
        )
        self._merge(s, shape)
        if s.has_chunk and self._loads is not None:
            self._loads.done()

    def _prefills(self, s: Shape, kv: Tensor) -> None:
        """All prefill attention of a batch. ``kv``: one layer of the GPU-cache.

        One launch, for later chunks of CPU prefills too; a second such chunk waits for a staging
        buffer of its own, so that each after the first has a launch of its own.
        """
        if not s.has_chunk:
            self.prefill(s, kv, kv, range(s.tiles))
            return
        assert self._loads is not None
        begin = 0
        for end in (*(chunk.tile_first for chunk in s.cpu_chunks[1:]), s.tiles):
            self.prefill(s, kv, self._loads.take(), range(begin, end))
            self._loads.done()
            begin = end

    def prefill(self, s: Shape, kv: Tensor, staging: Tensor, tiles: range) -> None:
        """``staging``: [2][1][tokens][..], earlier tokens of the tiles' later chunk, if any."""
        c, f, cfg = self._channel(s), self._channel(s).fields, self._config
        tile, warps, stages = self.prefill_tiles
        attention.prefill_kernel[(cfg.num_attention_heads, len(tiles))](
            c.qkv,
            kv,
            kv.stride(0),
            f["tables"],
            f["table_stride"],
            staging,
            staging.stride(0),
            c.attn,
            self._scale,
            f["tile_rows"][tiles.start :],
            f["tile_firsts"][tiles.start :],
            f["prefill_tokens"],
            f["prefill_news"],
            f["prefill_starts"],
            f["prefill_tables"],
            HEADS=cfg.num_attention_heads,
            KV_HEADS=cfg.num_key_value_heads,
            HEAD_DIM=cfg.head_dim,
            DIM_PAD=self._dim_pad,
            BLOCK_SIZE=self.cache.block_size,
            TILE_Q=TILE_Q,
            TILE=tile,
            num_warps=warps,
            num_stages=stages,
        )

    def begin_chunks(self, shapes: Sequence[Shape], layers: int) -> None:
        """Starts to load what later chunks of CPU prefills attend over."""
        if self._loads is None or self.exchange is None:
            return
        self._loads.begin([chunk for s in shapes for chunk in s.cpu_chunks], layers)
        for s in shapes:
            if s.chunk_place:  # of one batch at most
                ints = self._channel(s).fields["chunk"]
                table = self.buffers.chunk.on(ints, self.exchange.copy_tiles.rows)
                self._loads.begin_open(table, layers)
