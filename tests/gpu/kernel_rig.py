"""Stages on a small random model, fed by plans as the executor feeds them. Needs Triton."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import neo_native as native
from gpu_worker import ops
from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.stages import Stages
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel
from gpu_worker.offload import as_numpy
from gpu_worker.plan_check import PlanLimits
from gpu_worker.weights import TORCH_DTYPES, dummy_weights
from neo_native import SegmentKind, SwapKind
from neo_native.segments import SegmentSet
from protos.config import DType
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import MAX_SWAPS, Row, make_geometry, make_segment, make_step

DEVICE = torch.device("cuda", 0)
SLOTS, LEN, MAX_ROWS, MAX_TOKENS, PAGE_SIZE = 16, 512, 512, 1024, 16
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # relative L2
LAYER = 1  # the last of config_of's two


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def config_of(head_dim: int, heads: int, kv_heads: int, vocab_size: int = 320) -> ModelConfig:
    """Two layers; widths that are no powers of two."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=LEN,
        tie_word_embeddings=False,
        dtype=DType.BFLOAT16,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


class KernelRig:
    """Every slot owns scattered blocks and pages; all of the GPU-cache is random."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DType,
        block_size: int = 16,
        kv_code: int | None = None,
        seed: int = 0,
    ) -> None:
        """``kv_code``: wire dtype of a CPU-cache; None: there is none."""
        self.config, self.dtype, self.block_size = config, TORCH_DTYPES[dtype], block_size
        self.random = torch.Generator(device=DEVICE).manual_seed(seed)
        sizes = {
            "block_size": block_size, "max_blocks": LEN // block_size, "page_size": PAGE_SIZE,
            "max_pages": LEN // PAGE_SIZE, "n_pages": SLOTS * LEN // PAGE_SIZE,
            "max_slots": SLOTS, "max_rows": MAX_ROWS, "max_tokens": MAX_TOKENS,
            "max_tasks": 2 * MAX_ROWS * config.num_key_value_heads,
        }  # fmt: skip
        if kv_code is not None:
            sizes["kv_dtype"] = kv_code
        self.geometry = make_geometry(config, dtype, **sizes)
        self._tables = make_segment(SegmentKind.SEQUENCES, self.geometry)
        self.sequences = native.Sequences(self._tables, self.geometry)
        self.num_blocks = SLOTS * LEN // block_size
        shuffle = np.random.default_rng(seed)
        for table in (self.sequences.block_table, self.sequences.page_table):
            table[:] = shuffle.permutation(table.size).reshape(table.shape)
        limits = PlanLimits.from_geometry(self.geometry, self.num_blocks, LEN, config.vocab_size)
        self.reader = HostPlanReader(self.sequences, limits)
        weights = dummy_weights(config, self.dtype, DEVICE, seed)
        for norm in (weights.norm, *(w.input_norm for w in weights.layers),
                     *(w.post_norm for w in weights.layers)):  # fmt: skip
            norm.uniform_(0.5, 1.5, generator=self.random)
        model = LlamaModel(config, weights, ops.select(DEVICE), LEN)
        self.cache = GpuCache(config, self.num_blocks, block_size, self.dtype, DEVICE)
        self.cache.blocks.copy_(self.normal(*self.cache.blocks.shape))
        self.buffers = Buffers(config, limits, self.reader.layout, self.dtype, DEVICE, True)
        self.buffers.stage_for(config, LEN)
        self.segments: Any = self._segments() if kv_code is not None else None
        self.exchange = self._exchange() if self.segments else None
        self.stages = Stages(model, self.cache, self.buffers, self.exchange, LEN)
        self._plan_id = 0

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random values in the activations' dtype."""
        made = torch.randn(shape, generator=self.random, device=DEVICE) * scale
        return made.to(self.dtype)

    def _segments(self) -> Any:
        kinds = {"control": SegmentKind.CONTROL, "work": SegmentKind.WORK,
                 "exchange": SegmentKind.EXCHANGE, "cpu_cache": SegmentKind.CPU_CACHE}  # fmt: skip
        made = {name: make_segment(kind, self.geometry) for name, kind in kinds.items()}
        return SimpleNamespace(geometry=self.geometry, sequences=self._tables, **made)

    def _exchange(self) -> DeviceExchange:
        s = self.segments
        self._control = native.Control(s.control)
        side = native.Exchange(self._control, s.work, s.exchange, self.geometry)
        segments = cast(SegmentSet, s)
        return DeviceExchange(side, segments, self.reader, self.dtype, 10.0, DEVICE)

    def close(self) -> None:
        """Unpins."""
        if self.exchange:
            torch.cuda.synchronize()
            for segment in self.exchange._mapped:
                segment.close()

    @contextmanager
    def worker(self, threads: int) -> Iterator[None]:
        """Attention threads in this process."""
        s = self.segments
        worker = native.AttentionWorker(
            self._control, s.work, s.exchange, s.cpu_cache, s.sequences, 0, threads, []
        )
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    def upload(
        self,
        rows: Sequence[Row],
        swaps: Sequence[tuple[int, SwapKind, int]] = (),
        announce: bool = False,
    ) -> tuple[HostPlan, Shape]:
        """Reads a plan of one batch and puts its metadata where kernels look for it."""
        self._plan_id += 1
        assert len(swaps) <= MAX_SWAPS
        sizes = {"max_rows": MAX_ROWS, "max_tokens": MAX_TOKENS}
        plan = self.reader.read(make_step(self._plan_id, rows, swaps=swaps, **sizes))
        if announce:
            assert self.exchange is not None
            self.exchange.announce(plan)
        batch = plan.batches[0]
        meta = torch.from_numpy(batch.meta[: batch.used])
        self.buffers.channels[0].meta[: batch.used].copy_(meta)
        return plan, Shape.of(batch)

    def cached(self, layer: int, slot: int, n: int) -> tuple[Tensor, Tensor]:
        """K and V of a slot's first tokens in the GPU-cache, [n, kv_heads, head_dim] each."""
        at = np.arange(n)
        blocks = self.sequences.block_table[slot, at // self.block_size].astype(np.int64)
        index = torch.from_numpy(blocks * self.block_size + at % self.block_size).to(DEVICE)
        return self.cache.load(layer, index)

    def projection(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of Q, K and V of the first ``n`` tokens, [n, heads, head_dim]."""
        c = self.config
        heads = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        whole = self.buffers.channels[0].qkv[:n].view(n, -1, c.head_dim)
        q, k, v = whole.split(heads, dim=1)
        return q, k, v

    def attention(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Causal, in float64; ``q``: [new, heads, head_dim] at positions from ``start`` on."""
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.config.attention_scale
        at = torch.arange(len(q), device=DEVICE) + start
        later = torch.arange(len(k), device=DEVICE) > at[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)

    def host_cache(self) -> tuple[native.CpuCache, native.Segment]:
        """Another CPU-cache of the same layout and tables, empty."""
        segment = make_segment(SegmentKind.CPU_CACHE, self.geometry)
        return native.CpuCache(segment, self.sequences, self.geometry), segment

    def tiles(self, segment: native.Segment) -> bytes:
        """All pages of a CPU-cache, scales too."""
        first = native.device_layout(self.geometry)["tiles"]
        return cast(bytes, bytes_of(segment)[first:].tobytes())


def make_rig(
    head_dim: int = 64,
    group: int = 2,
    block_size: int = 16,
    dtype: DType = DType.BFLOAT16,
    kv_code: int | None = None,
    vocab_size: int = 320,
) -> KernelRig:
    config = config_of(head_dim, 2 * group, 2, vocab_size)
    return KernelRig(config, dtype, block_size, kv_code)


def peaked(r: KernelRig, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fills Q, K and V of ``n`` tokens; scores spread so that few tokens matter to each query."""
    q, k, v = r.projection(n)
    q.copy_(r.normal(*q.shape, scale=4.0))
    k.copy_(r.normal(*k.shape))
    v.copy_(r.normal(*v.shape))
    return q, k, v


def run_attention(r: KernelRig, shape: Shape, n: int) -> Tensor:
    """Output by token, [n, heads, head_dim]; 7 where no kernel wrote."""
    attn = r.buffers.channels[0].attn
    if shape.has_chunk:  # whose earlier tokens come layer by layer
        r.stages.begin_chunks([shape], LAYER + 1)
        for layer in range(LAYER):
            r.stages.attend(shape, layer)
    attn.fill_(7.0)
    r.stages.attend(shape, LAYER)
    heads = r.config.num_attention_heads
    return attn[:n].view(n, heads, -1)


def bytes_of(segment: native.Segment) -> Any:
    """A view of a whole segment."""
    whole = (ctypes.c_uint8 * segment.size).from_address(segment.address)
    return np.ctypeslib.as_array(whole)


def on_host(x: Tensor) -> Any:
    """A contiguous numpy copy as the extension takes it: 16-bit floats as uint16."""
    return as_numpy(x.detach().cpu().contiguous())


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Relative L2, over all of it and over the worst row."""
    found, wanted = found.double().flatten(1), wanted.double().flatten(1)
    assert torch.isfinite(found).all()
    error = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    assert error.max() <= tolerance, f"row {int(error.argmax())}: {float(error.max()):.2e}"
