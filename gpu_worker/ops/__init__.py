"""The operations of a Llama layer, as a table of implementations.

The model and the executor call only what ``Ops`` lists, so a backend is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.ops import attention, norm, rope


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation; shapes are given where they are defined."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    prefill_attention: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
    decode_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


BACKENDS: dict[str, Ops] = {
    "torch": Ops(
        rms_norm=norm.rms_norm,
        apply_rope=rope.apply_rope,
        silu_and_mul=norm.silu_and_mul,
        prefill_attention=attention.prefill_attention,
        decode_attention=attention.decode_attention,
    ),
}


def select(device: torch.device) -> Ops:
    """The best backend for a device."""
    del device  # one backend so far serves both
    return BACKENDS["torch"]
