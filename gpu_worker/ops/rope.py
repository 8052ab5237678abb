"""Rotary position embedding (Su et al. 2021) with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protos.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return frequencies
    return _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def rope_table(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """Cosines and sines of all positions: fp32 [max_positions, 2, head_dim / 2]."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dimension i against i + head_dim / 2, in fp32; returns ``x``'s dtype.

    ``x``: [tokens, heads, head_dim]; ``cos``, ``sin``: fp32 [tokens, 1, head_dim / 2].
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
