"""Matrix products of a few tokens, which are bound by reading the weights.

Measured against cuBLAS on an H200 for one token of an 8B model: 116 against 122 microseconds a
layer; from 16 tokens on cuBLAS is as fast or faster (docs/decisions.md).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 8
WIDE = 16384  # outputs from which on larger tiles keep more bytes in flight


@triton.jit
def skinny_kernel(
    x, weight, out, tokens, outputs,
    WIDTH: tl.constexpr, TOKENS_PAD: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """``out[m, n] = sum over k of x[m, k] weight[n, k]`` for TILE_N outputs and all tokens."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = tl.arange(0, TOKENS_PAD)
    k = tl.arange(0, TILE_K)
    acc = tl.zeros((TOKENS_PAD, TILE_N), tl.float32)
    for start in range(0, WIDTH, TILE_K):
        a = tl.load(
            x + m[:, None] * WIDTH + (start + k)[None, :], mask=(m < tokens)[:, None], other=0.0
        )
        w = tl.load(weight + n[None, :].to(tl.int64) * WIDTH + (start + k)[:, None])
        acc = tl.dot(a, w, acc)
    at = out + m[:, None] * outputs + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < tokens)[:, None])


def linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out = x weight^T``, all contiguous. x: [tokens, width]; weight: [outputs, width]."""
    tokens, width = x.shape
    outputs = len(weight)
    wide = outputs >= WIDE
    tile_n, tile_k = (64, 256) if wide else (32, 256)
    narrow = x.dtype is not torch.float32 and tokens <= MOST_TOKENS
    if not narrow or outputs % tile_n or width % tile_k:
        torch.mm(x, weight.t(), out=out)
        return
    skinny_kernel[(outputs // tile_n,)](
        x,
        weight,
        out,
        tokens,
        outputs,
        WIDTH=width,
        TOKENS_PAD=16,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=8 if wide else 4,
        num_stages=3 if wide else 4,
    )
