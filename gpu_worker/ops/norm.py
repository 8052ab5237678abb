"""RMSNorm and the gated activation, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich 2019).

    ``x``: fp32 [tokens, hidden], the residual stream. ``weight``: [hidden] in the activations'
    dtype, which the result has too. The sum of squares stays in fp32: the demo model's hidden
    states reach 25,796, whose square overflows fp16.
    """
    return F.rms_norm(x, (x.shape[-1],), eps=eps).to(weight.dtype) * weight


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``. ``gate_up``: [tokens, 2 * intermediate], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up)
