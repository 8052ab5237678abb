"""Kernels of one plan against float64: attention, the linear stage, the head, greedy tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytest.importorskip("triton")

import triton

from gpu_worker.cuda import elementwise
from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.stages import GREEDY_BLOCK
from neo_native import RowKind
from protos.config import DType
from tests.gpu.kernel_rig import (
    DEVICE,
    LAYER,
    LEN,
    TOLERANCE,
    assert_close,
    inference,
    make_rig,
    peaked,
    run_attention,
)
from tests.helpers.engine_rig import Row

__all__ = ["inference"]  # a fixture of every test

# head_dim, query heads per KV head, block size
SHAPES = [(64, 1, 8), (64, 8, 16), (80, 3, 16), (96, 2, 32), (128, 4, 16), (128, 5, 8),
          (128, 7, 32), (256, 6, 16)]  # fmt: skip
DTYPES = [DType.BFLOAT16, DType.FLOAT32]
# Lengths around the edges of blocks and of the 64 tokens that a program reads at a time.
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 128, 129, 300, LEN]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "block_size"), SHAPES)
@pytest.mark.parametrize("splits", [0, 1, 2, 64])
def test_decode_attention(
    head_dim: int, group: int, block_size: int, dtype: DType, splits: int
) -> None:
    r = make_rig(head_dim, group, block_size, dtype)
    rows = [Row(i, RowKind.DECODE_GPU, n - 1, [5]) for i, n in enumerate(LENGTHS)]
    _, shape = r.upload(rows)
    spare = 1  # row that a graph's bucket has and the plan has not
    n = len(rows) + spare
    shape = Shape(0, n, n, splits=splits)
    assert n * splits * r.config.num_attention_heads <= len(r.buffers.part_o)
    q, _, _ = peaked(r, n)
    found = run_attention(r, shape, n)
    wanted = [
        r.attention(q[i : i + 1], *r.cached(LAYER, i, length), start=length - 1)
        for i, length in enumerate(LENGTHS)
    ]
    assert_close(found[: len(rows)].flatten(0, 1), torch.cat(wanted).flatten(0, 1),
                 TOLERANCE[r.dtype])  # fmt: skip
    assert (found[len(rows) :] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "block_size"), SHAPES)
def test_prefill_attention_with_and_without_earlier_tokens(
    head_dim: int, group: int, block_size: int, dtype: DType
) -> None:
    r = make_rig(head_dim, group, block_size, dtype)
    spans = [(0, 1), (0, 63), (0, 64), (0, 65), (5, 3), (64, 64), (100, 70), (17, 130), (382, 130)]
    rows = [Row(i, RowKind.PREFILL_GPU, start, [5] * new) for i, (start, new) in enumerate(spans)]
    _, shape = r.upload(rows)
    n = shape.tokens
    q, k, v = peaked(r, n)
    found = run_attention(r, shape, n)
    at, wanted = 0, []
    for slot, (start, new) in enumerate(spans):
        own = slice(at, at + new)
        k_then, v_then = r.cached(LAYER, slot, start)
        wanted.append(
            r.attention(q[own], torch.cat((k_then, k[own])), torch.cat((v_then, v[own])), start)
        )
        at += new
    assert_close(found.flatten(0, 1), torch.cat(wanted).flatten(0, 1), TOLERANCE[r.dtype])


@pytest.mark.parametrize("spare", [0, 80])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "block_size"), SHAPES)
def test_prefills_and_decodes_in_one_launch(
    head_dim: int, group: int, block_size: int, dtype: DType, spare: int
) -> None:
    """``spare``: rows that a graph's bucket has and the plan has not; with 80 nothing is split."""
    r = make_rig(head_dim, group, block_size, dtype)
    rows = [
        Row(0, RowKind.PREFILL_GPU, 40, [5] * 70),
        Row(1, RowKind.PREFILL_GPU, 0, [5] * 10),
        Row(2, RowKind.DECODE_GPU, 199, [5]),
        Row(3, RowKind.DECODE_GPU, 30, [5]),
    ]
    _, shape = r.upload(rows)
    q, k, v = peaked(r, shape.tokens)
    found = run_attention(r, replace(shape, gpu_rows=2 + spare), shape.tokens)
    k_then, v_then = r.cached(LAYER, 0, 40)
    wanted = [
        r.attention(q[:70], torch.cat((k_then, k[:70])), torch.cat((v_then, v[:70])), 40),
        r.attention(q[70:80], k[70:80], v[70:80], 0),
        r.attention(q[80:81], *r.cached(LAYER, 2, 200), start=199),
        r.attention(q[81:82], *r.cached(LAYER, 3, 31), start=30),
    ]
    assert_close(found.flatten(0, 1), torch.cat(wanted).flatten(0, 1), TOLERANCE[r.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 70])
def test_the_linear_stage(dtype: DType, tokens: int) -> None:
    r = make_rig(64, 3, 16, dtype)
    c, w, eps = r.buffers.channels[0], r.stages.model.weights, r.config.rms_norm_eps
    c.residual.copy_(torch.randn(c.residual.shape, generator=r.random, device=DEVICE))
    c.attn.copy_(r.normal(*c.attn.shape))
    x, attn = c.residual[:tokens].double(), c.attn[:tokens].double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.double(), eps)

    shape = Shape(0, tokens, 0)
    r.stages.linear(shape, 0)
    wanted = norm(x, w.layers[0].input_norm) @ w.layers[0].qkv.double().t()
    assert_close(c.qkv[:tokens], wanted, TOLERANCE[r.dtype])
    assert torch.equal(c.residual[:tokens].double(), x)

    r.stages.linear(shape, 1)
    first = w.layers[0]
    x = x + attn @ first.o.double().t()
    gate, up = (norm(x, first.post_norm) @ first.gate_up.double().t()).chunk(2, dim=-1)
    x = x + (F.silu(gate) * up) @ first.down.double().t()
    assert_close(c.residual[:tokens], x, TOLERANCE[r.dtype])
    wanted = norm(x, w.layers[1].input_norm) @ w.layers[1].qkv.double().t()
    assert_close(c.qkv[:tokens], wanted, TOLERANCE[r.dtype])


def test_a_continuing_row_is_embedded_from_the_token_sampled_last() -> None:
    r = make_rig()
    _, shape = r.upload([Row(3, RowKind.DECODE_GPU, 9, [-1]), Row(5, RowKind.DECODE_GPU, 9, [17])])
    r.buffers.last_tokens[3] = 211
    r.buffers.last_tokens[5] = 4
    r.stages.forward([shape])
    # Layers add to the residual, so it is compared with that of a plan that names the tokens.
    found = r.buffers.channels[0].residual[:2].clone()
    _, named = r.upload([Row(3, RowKind.DECODE_GPU, 9, [211]), Row(5, RowKind.DECODE_GPU, 9, [17])])
    r.stages.forward([named])
    assert torch.equal(found, r.buffers.channels[0].residual[:2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_takes_the_sampled_rows(dtype: DType) -> None:
    r = make_rig(dtype=dtype)
    rows = [
        Row(0, RowKind.PREFILL_GPU, 0, [5] * 40),
        Row(1, RowKind.PREFILL_GPU, 0, [5] * 3, sample=False),
        Row(7, RowKind.DECODE_GPU, 20, [5]),
    ]
    _, shape = r.upload(rows)
    c, b, w = r.buffers.channels[0], r.buffers, r.stages.model.weights
    c.residual.copy_(torch.randn(c.residual.shape, generator=r.random, device=DEVICE))
    b.delta.copy_(r.normal(*b.delta.shape))
    before = c.residual.clone()
    r.stages.head(shape)
    at = torch.tensor([39, 43], device=DEVICE)
    x = before[at].double() + b.delta[at].double()
    normed = F.rms_norm(x, (x.shape[-1],), w.norm.double(), r.config.rms_norm_eps)
    logits = b.logits[0, :2]
    assert_close(logits, normed @ w.head.double().t(), TOLERANCE[r.dtype])
    tokens = logits.argmax(dim=-1)
    assert b.tokens_out(0)[:2].tolist() == tokens.tolist()
    assert b.last_tokens[[0, 7]].tolist() == tokens.tolist()
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(b.logprobs_out(0)[:2].double(), wanted, atol=1e-5, rtol=0)
    assert torch.equal(c.residual, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [320, GREEDY_BLOCK, GREEDY_BLOCK + 1, 49152, 128256])
def test_greedy_is_argmax_and_log_softmax(vocab: int, dtype: torch.dtype) -> None:
    random = torch.Generator(device=DEVICE).manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=random, device=DEVICE) * 5
    logits[1, [vocab // 3, vocab - 1]] = 60.0  # equals: the first
    logits[2, vocab - 1] = 100.0
    logits[3] = -1e4
    logits[3, 0] = -9e3
    logits[4, : vocab - 2] = -torch.inf
    logits[5] = 3.0
    logits = logits.to(dtype)
    slots = torch.tensor([4, 0, 5, 1, 3, 2], dtype=torch.int32, device=DEVICE)
    last, tokens = (torch.full((n,), -9, dtype=torch.int32, device=DEVICE) for n in (7, 6))
    logprobs = torch.zeros(6, device=DEVICE)
    elementwise.greedy_kernel[(6,)](
        logits, slots, last, tokens, logprobs, vocab,
        VOCAB_PAD=triton.cdiv(vocab, GREEDY_BLOCK) * GREEDY_BLOCK, BLOCK=GREEDY_BLOCK, num_warps=16,
    )  # fmt: skip
    best = logits.double().max(dim=-1).values
    first = (logits.double() == best[:, None]).int().argmax(dim=-1)
    assert tokens.tolist() == first.tolist()
    assert last[slots.long()].tolist() == first.tolist()
    assert last[6] == -9
    wanted = best - logits.double().logsumexp(-1)
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-4, rtol=1e-5)
