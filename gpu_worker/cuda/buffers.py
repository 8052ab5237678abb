"""Memory that iterations use, allocated once: captured graphs hold these addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.cuda.buckets import MIXED_ROWS
from gpu_worker.cuda.plan import PAD_TOKENS, MetaLayout
from gpu_worker.cuda.rides import RideBuffers, RideLayout
from gpu_worker.plan_check import PlanLimits
from protos.model_config import ModelConfig

CHANNELS = 2
MAX_SPLITS = 32  # of a sequence, in decode attention on the device
SPLIT_ROWS = 512  # row x KV head x split at most, where there are several: an H200 runs 660 at once


@dataclass(frozen=True)
class ChannelBuffers:
    """What one sub-batch keeps from stage to stage."""

    meta: Tensor  # int32, as MetaLayout says
    fields: dict[str, Tensor]  # views of ``meta``
    residual: Tensor  # fp32 [tokens, hidden]
    qkv: Tensor  # [tokens, q_size + 2 * kv_size]
    attn: Tensor  # [tokens, q_size]


class Buffers:
    """For plans of up to ``limits.max_tokens`` tokens; scratch is shared by both sub-batches."""

    def __init__(
        self,
        config: ModelConfig,
        limits: PlanLimits,
        layout: MetaLayout,
        dtype: torch.dtype,
        device: torch.device,
        two_batches: bool,
    ) -> None:
        lead = limits.ride_capacity if limits.ride_groups else 0
        tokens = limits.max_tokens + PAD_TOKENS + lead
        rows = limits.max_rows + PAD_TOKENS + lead
        self.rides: RideBuffers | None = None
        if limits.ride_groups:
            self.rides = RideBuffers(RideLayout(limits), config.hidden_size, device)

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = config.q_size + 2 * config.kv_size
        self.chunk = layout.chunk
        self._blank = torch.from_numpy(layout.blank).to(device)
        self.channels: list[ChannelBuffers] = []
        for _ in range(CHANNELS if two_batches else 1):
            meta = make(layout.size, dtype=torch.int32)
            residual = make(tokens, config.hidden_size, dtype=torch.float32)
            qkv, attn = make(tokens, width), make(tokens, config.q_size)
            self.channels.append(ChannelBuffers(meta, layout.views(meta), residual, qkv, attn))
        self.blank()
        self.hidden = make(tokens, config.hidden_size)
        self.delta = make(tokens, config.hidden_size)  # what the next norm adds to the residual
        self.gate_up = make(tokens, 2 * config.intermediate_size)
        self.inner = make(tokens, config.intermediate_size)
        parts = self.split_parts(config, rows)
        self.part_o = make(parts, config.head_dim, dtype=torch.float32)
        self.part_ml = make(parts, 2, dtype=torch.float32)
        self.last_tokens = make(limits.max_slots + 1, dtype=torch.int32)
        self.head = make(CHANNELS, rows, config.hidden_size)
        self.logits = make(CHANNELS, rows, config.vocab_size)
        # Per channel: tokens [rows], logprobs [rows] as bits, void flag, waited ns (int64).
        # Then for riders: waited ns, void flag by stage.
        width = max(2 * rows, (limits.ride_groups + 1) // 2 * 2) + 4
        self.outcome = make(CHANNELS + 1, width, dtype=torch.int32)
        # Two times K and V of one layer of one sequence, as a cache of one block: see stage_for.
        self.staging = make(0)
        self.rows = rows

    def blank(self) -> None:
        """Metadata of no rows: until a plan's is there, nothing is stored anywhere."""
        for channel in self.channels:
            channel.meta[: len(self._blank)] = self._blank

    def stage_for(self, config: ModelConfig, tokens: int) -> None:
        """Room for the earlier chunks of a CPU prefill, one layer at a time, two deep."""
        shape = (2, 2, 1, tokens, config.num_key_value_heads, config.head_dim)
        self.staging = torch.zeros(shape, dtype=self.hidden.dtype, device=self.hidden.device)

    def tokens_out(self, channel: int) -> Tensor:
        """int32 [rows]."""
        return self.outcome[channel, : self.rows]

    def logprobs_out(self, channel: int) -> Tensor:
        """fp32 [rows]."""
        return self.outcome[channel, self.rows : 2 * self.rows].view(torch.float32)

    def voided(self, channel: int) -> Tensor:
        """int32 [1]."""
        return self.outcome[channel, 2 * self.rows : 2 * self.rows + 1]

    def waited_ns(self, channel: int) -> Tensor:
        """int64 [1]."""
        return self.outcome[channel, 2 * self.rows + 2 :].view(torch.int64)

    @property
    def rides_waited_ns(self) -> Tensor:
        """int64 [1]."""
        return self.outcome[CHANNELS, :2].view(torch.int64)

    @property
    def rides_voided(self) -> Tensor:
        """int32 [stages] and beyond."""
        return self.outcome[CHANNELS, 2:]

    @staticmethod
    def split_parts(config: ModelConfig, rows: int) -> int:
        """The most that any number of rows needs, beside prefills too."""
        alone = (n * n_splits(n, config) for n in range(1, rows + 1))
        beside = (held * splits for held, splits in MIXED_ROWS)
        return max(*alone, *beside) * config.num_attention_heads


def n_splits(rows: int, config: ModelConfig) -> int:
    """Splits of each sequence so that few rows fill the device too: a power of two."""
    wanted = max(SPLIT_ROWS // (rows * config.num_key_value_heads), 1)
    return int(min(MAX_SPLITS, 1 << (wanted.bit_length() - 1)))
