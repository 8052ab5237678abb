"""The stages of an iteration as launches on static buffers: run as they are, or captured.

The order of a layer is that of ``gpu_worker.executor``: join the O that the cpu workers owe, linear
stage, stores and hand-off, attention (arXiv 2411.01142, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from gpu_worker.cuda import elementwise, handoff
from gpu_worker.cuda.attention_stages import AttentionStages
from gpu_worker.cuda.beside import Beside
from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.buffers import Buffers, ChannelBuffers
from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.ride_kernel import ride_kernel
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel
from gpu_worker.ops.rope import rope_table

BLOCK = 1024
GREEDY_BLOCK = 8192  # logits of a row that are read at a time
RIDE_PART = 4  # heads of one program of a rider
FEW_TOKENS = 64  # up to which a token's heads are spread over more programs


class Stages(AttentionStages):
    """All launches of an iteration, in their order."""

    def __init__(
        self,
        model: LlamaModel,
        cache: GpuCache,
        buffers: Buffers,
        exchange: DeviceExchange | None,
        max_positions: int,
    ) -> None:
        super().__init__(model, cache, buffers, exchange)
        # Where riders leave and arrive; None: in line with the rows.
        self.beside: Beside | None = None
        if buffers.rides is not None and model.device.type == "cuda":
            self.beside = Beside(model.device)
        self._rope = rope_table(model.config, max_positions, model.device)

    def forward(
        self,
        shapes: Sequence[Shape],
        at_end: Callable[[Shape], None] | None = None,
        at_layer: Callable[[int], None] | None = None,
    ) -> None:
        """From token ids to sampled greedy tokens, one sub-batch or two interleaved.

        ``at_end``: called for each sub-batch behind its last layer; what its residual rows still
        lack is in ``delta`` then. ``at_layer``: called before each layer's launches.
        """
        self.buffers.outcome.zero_()
        n_layers = self._config.num_hidden_layers
        self.begin_chunks(shapes, n_layers)
        for s in shapes:
            self._embed(s)
        for layer in range(n_layers):
            if at_layer is not None:
                at_layer(layer)
            for s in shapes:
                self.join(s, layer)
                self.join_riders(s, layer)
                self.linear(s, layer)
                self.fork_riders(s, layer)
                self.store(s, layer)
                self.attend(s, layer)
        for s in shapes:
            self.join(s, n_layers)
            self.join_riders(s, n_layers)
            self._post_projection(s, n_layers - 1)
            if at_end is not None:
                at_end(s)
            self.head(s)

    def _embed(self, s: Shape) -> None:
        c, f = self._channel(s), self._channel(s).fields
        hidden = self._config.hidden_size
        elementwise.embed_kernel[(s.tokens, triton.cdiv(hidden, BLOCK))](
            f["ids"],
            f["slots"],
            self.buffers.last_tokens,
            self.model.weights.embedding,
            c.residual,
            HIDDEN=hidden,
            BLOCK=BLOCK,
        )

    def _norm(self, c: ChannelBuffers, n: int, weight: Tensor, delta: bool) -> Tensor:
        out, hidden = self.buffers.hidden[:n], self._config.hidden_size
        elementwise.add_rms_norm_kernel[(n,)](
            c.residual,
            self.buffers.delta,
            c.residual,
            weight,
            out,
            self._config.rms_norm_eps,
            HIDDEN=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            HAS_DELTA=delta,
            INDEXED=False,
            num_warps=8 if hidden > 2048 else 4,
        )
        return out

    def linear(self, s: Shape, layer: int) -> None:
        """Post-projection of ``layer - 1``, then pre-projection of ``layer``."""
        if layer > 0:
            self._post_projection(s, layer - 1)
        c, n = self._channel(s), s.tokens
        w = self.model.weights.layers[layer]
        h = self._norm(c, n, w.input_norm, delta=layer > 0)
        torch.mm(h, w.qkv.t(), out=c.qkv[:n])

    def _post_projection(self, s: Shape, layer: int) -> None:
        """Leaves the MLP's output in ``delta``: the next norm adds it."""
        c, n, b = self._channel(s), s.tokens, self.buffers
        w = self.model.weights.layers[layer]
        torch.mm(c.attn[:n], w.o.t(), out=b.delta[:n])
        h = self._norm(c, n, w.post_norm, delta=True)
        torch.mm(h, w.gate_up.t(), out=b.gate_up[:n])
        inner = self._config.intermediate_size
        elementwise.silu_mul_kernel[(n, triton.cdiv(inner, BLOCK))](
            b.gate_up, b.inner, INNER=inner, BLOCK=BLOCK
        )
        torch.mm(b.inner[:n], w.down.t(), out=b.delta[:n])

    def store(self, s: Shape, layer: int) -> None:
        """RoPE; K and V into their caches; Q to the cpu workers, then the epoch."""
        c, e, cfg = self._channel(s), self.exchange, self._config
        n, kv, qkv = s.tokens - s.lead, self.cache.blocks[layer], c.qkv[s.lead :]
        heads = cfg.num_attention_heads + 2 * cfg.num_key_value_heads
        part = 4 if n <= FEW_TOKENS else 16
        to_cpu = e is not None and s.to_cpu
        f = {
            name: c.fields[name][s.lead :]
            for name in ("positions", "cache_slots", "pages", "page_rows", "q_rows")
        }
        elementwise.rope_store_kernel[(n, triton.cdiv(heads, part))](
            qkv,
            f["positions"],
            self._rope,
            kv,
            f["cache_slots"],
            kv.stride(0),
            f["pages"],
            f["page_rows"],
            f["q_rows"],
            e.tiles if e and to_cpu else qkv,
            e.scales if e and to_cpu else self._rope,
            e.q(s.channel) if e and to_cpu else qkv,
            layer,
            e.n_pages if e else 0,
            e.tile_stride if e else 0,
            e.scale_stride if e else 0,
            HEADS=cfg.num_attention_heads,
            KV_HEADS=cfg.num_key_value_heads,
            HEAD_DIM=cfg.head_dim,
            HALF=triton.next_power_of_2(cfg.head_dim // 2),
            PART=part,
            TO_CPU=to_cpu,
            INT8=bool(e and to_cpu and e.is_int8),
        )
        if s.cpu_rows and e:
            handoff.publish_kernel[(1,)](
                c.fields["first_epoch"], e.published(s.channel), layer, num_warps=1
            )

    def fork_riders(self, s: Shape, layer: int) -> None:
        """Behind the linear stage: ``pass_riders``, beside what the rows do until the next one."""
        if not s.lead:
            return
        if self.beside is None:
            self.pass_riders(s, layer)
            return
        with self.beside.launched():
            self.pass_riders(s, layer)

    def join_riders(self, s: Shape, layer: int) -> None:
        """The group of this stage is in the places before the rows; the first is embedded."""
        if s.lead and layer > 0 and self.beside is not None:
            self.beside.join()

    def pass_riders(self, s: Shape, layer: int) -> None:
        """The group of this stage leaves its places, that of the next one arrives in them."""
        rides, e = self.buffers.rides, self.exchange
        if rides is None or e is None:
            return
        c, f, cfg, b = self._channel(s), rides.fields, self._config, self.buffers
        rope_parts = triton.cdiv(cfg.num_attention_heads + 2 * cfg.num_key_value_heads, RIDE_PART)
        row_parts = triton.cdiv(cfg.hidden_size, BLOCK)
        fields = ("publishes", "collects", "group", "count", "positions", "pages", "page_rows")
        ride_kernel[(s.lead, rope_parts + row_parts + cfg.num_key_value_heads)](
            layer,
            *(f[name] for name in (*fields, "store_rows", "tasks")),
            *(rides.arrived, c.qkv, self._rope, e.tiles, e.scales, e.ride_q),
            *(e.n_pages, e.tile_stride, e.scale_stride, e.ride_published),
            *(c.residual, rides.residual),
            *(e.ride_done, e.ride_abort, rides.joined),
            *(b.rides_voided, b.rides_waited_ns, e.limit_ns),
            *(e.ride_words, e.ride_areas, c.attn),
            *(e.ride_tasks, e.area_floats, e.worker_area_floats),
            PLACES=rides.layout.capacity,
            HEADS=cfg.num_attention_heads,
            KV_HEADS=cfg.num_key_value_heads,
            HEAD_DIM=cfg.head_dim,
            HALF=triton.next_power_of_2(cfg.head_dim // 2),
            PART=RIDE_PART,
            ROPE_PARTS=rope_parts,
            INT8=e.is_int8,
            HIDDEN=cfg.hidden_size,
            BLOCK=BLOCK,
            ROW_PARTS=row_parts,
            DONE_WORDS=e.ride_done_words,
            GROUP=self._group["GROUP"],
            GROUP_PAD=triton.next_power_of_2(self._group["GROUP"]),
            DIM_PAD=self._dim_pad,
            EPOCH_SHIFT=e.epoch_shift,
            WORKER_SHIFT=e.worker_shift,
            FIELD_MASK=e.field_mask,
            num_warps=1,
        )

    def join(self, s: Shape, layer: int) -> None:
        """O of the layer before, from the cpu workers."""
        e = self.exchange
        if not s.cpu_rows or layer == 0 or e is None:
            return
        c, f, cfg = self._channel(s), self._channel(s).fields, self._config
        handoff.wait_kernel[(1,)](
            f["first_epoch"],
            e.done(s.channel),
            e.abort(s.channel),
            self.buffers.voided(s.channel),
            self.buffers.waited_ns(s.channel),
            layer - 1,
            e.limit_ns,
            num_warps=1,
        )
        handoff.collect_kernel[(s.cpu_rows, cfg.num_key_value_heads)](
            f["first_epoch"],
            f["cpu_count"],
            f["cpu_tokens"],
            f["cpu_tasks"],
            e.words(s.channel),
            e.areas(s.channel),
            c.attn,
            layer - 1,
            e.area_floats,
            e.worker_area_floats,
            HEADS=cfg.num_attention_heads,
            HEAD_DIM=cfg.head_dim,
            DIM_PAD=self._dim_pad,
            EPOCH_SHIFT=e.epoch_shift,
            WORKER_SHIFT=e.worker_shift,
            FIELD_MASK=e.field_mask,
            GROUP=self._group["GROUP"],
            GROUP_PAD=triton.next_power_of_2(self._group["GROUP"]),
            num_warps=1,
        )

    def head(self, s: Shape) -> None:
        """Logits of the sampled rows and their greedy tokens."""
        if not s.sampled:
            return
        c, f, b, cfg = self._channel(s), self._channel(s).fields, self.buffers, self._config
        hidden, logits = b.head[s.channel, : s.sampled], b.logits[s.channel, : s.sampled]
        elementwise.add_rms_norm_kernel[(s.sampled,)](
            c.residual,
            b.delta,
            f["sample_tokens"],
            self.model.weights.norm,
            hidden,
            cfg.rms_norm_eps,
            HIDDEN=cfg.hidden_size,
            BLOCK=triton.next_power_of_2(cfg.hidden_size),
            HAS_DELTA=True,
            INDEXED=True,
            num_warps=8 if cfg.hidden_size > 2048 else 4,
        )
        torch.mm(hidden, self.model.weights.head.t(), out=logits)
        elementwise.greedy_kernel[(s.sampled,)](
            logits,
            f["sample_slots"],
            b.last_tokens,
            b.tokens_out(s.channel),
            b.logprobs_out(s.channel),
            cfg.vocab_size,
            VOCAB_PAD=triton.cdiv(cfg.vocab_size, GREEDY_BLOCK) * GREEDY_BLOCK,
            BLOCK=GREEDY_BLOCK,
            num_warps=16,
        )
