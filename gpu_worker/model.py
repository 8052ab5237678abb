"""A Llama decoder, cut where NEO cuts it: at attention (arXiv 2411.01142, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gpu_worker.ops import Ops
from gpu_worker.ops.rope import rope_table
from gpu_worker.weights import LayerWeights, LlamaWeights
from protos.model_config import ModelConfig


@dataclass
class Activations:
    """What travels with one sub-batch from layer to layer."""

    residual: Tensor  # fp32 [tokens, hidden]
    cos: Tensor  # fp32 [tokens, 1, head_dim / 2]
    sin: Tensor  # fp32 [tokens, 1, head_dim / 2]
    q: Tensor  # [tokens, heads, head_dim]
    k: Tensor  # [tokens, kv_heads, head_dim]
    v: Tensor  # [tokens, kv_heads, head_dim]
    attn: Tensor  # [tokens, heads, head_dim], filled by attention wherever it runs


class LlamaModel:
    """The stages between two attentions; attention itself is the executor's.

    The residual stream and the sums of squares are fp32 whatever the dtype of the weights.
    """

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, ops: Ops, max_positions: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._rope = rope_table(config, max_positions, weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.weights.embedding.device

    def embed(self, tokens: Tensor, positions: Tensor) -> Activations:
        """``tokens``, ``positions``: int64 [tokens]."""
        residual = F.embedding(tokens, self.weights.embedding).float()
        cos, sin = self.rope(positions)
        heads = (len(tokens), self.config.num_attention_heads, self.config.head_dim)
        attn = torch.empty(heads, dtype=self.dtype, device=self.device)
        return Activations(residual, cos, sin, q=attn, k=attn, v=attn, attn=attn)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 [tokens, 1, head_dim / 2] each. ``positions``: int64 [tokens]."""
        cos, sin = self._rope[positions].unsqueeze(2).unbind(1)
        return cos, sin

    def linear_stage(self, x: Activations, layer: int) -> None:
        """Post-projection of ``layer - 1``, then pre-projection of ``layer``, where they exist.

        Reads ``x.attn``, updates ``x.residual``, sets ``x.q``, ``x.k`` and ``x.v``.
        """
        layers = self.weights.layers
        if layer > 0:
            self._post_projection(x, layers[layer - 1])
        if layer < len(layers):
            self._pre_projection(x, layers[layer])

    def _pre_projection(self, x: Activations, w: LayerWeights) -> None:
        c = self.config
        h = self.ops.rms_norm(x.residual, w.input_norm, c.rms_norm_eps)
        qkv = F.linear(h, w.qkv).view(len(h), -1, c.head_dim)
        rotated = c.num_attention_heads + c.num_key_value_heads
        qk = self.ops.apply_rope(qkv[:, :rotated], x.cos, x.sin)
        x.q, x.k = qk.tensor_split([c.num_attention_heads], dim=1)
        x.v = qkv[:, rotated:]

    def _post_projection(self, x: Activations, w: LayerWeights) -> None:
        x.residual += F.linear(x.attn.flatten(1), w.o)
        h = self.ops.rms_norm(x.residual, w.post_norm, self.config.rms_norm_eps)
        x.residual += F.linear(self.ops.silu_and_mul(F.linear(h, w.gate_up)), w.down)

    def logits(self, residual: Tensor) -> Tensor:
        """``residual``: fp32 [rows, hidden] after the last layer. Returns fp32 [rows, vocab]."""
        h = self.ops.rms_norm(residual, self.weights.norm, self.config.rms_norm_eps)
        return F.linear(h, self.weights.head).float()
