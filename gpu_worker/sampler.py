"""Chooses the next token of each row: greedy, temperature, top-k, top-p, min-p.

The filters apply in vLLM's order: temperature, min-p, top-k, top-p (over what top-k left). Tokens
that tie with the last one kept are kept too, so the outcome does not depend on a sort's order.
Noise is a hash of (seed, position, token id): a row done twice, on another device or in another
batch, draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]

# top-p needs the likeliest tokens in order; this many nearly always hold its share, and finding
# them among 49,152 takes 0.4 ms a row where a whole sort takes 4 ms (Zen 4, one thread).
MIN_TEMPERATURE = 1e-6  # below it nothing but the most likely token has a chance
CANDIDATES = 1024
# Logits that a CPU takes at a time. Temporaries of this size are used again and again; those of all
# rows together came from fresh pages every time: 200 rows of 49,152 took 0.32 s, and take 0.11 s
# (as above). From 1 to 8 MiB there is no difference.
PART_BYTES = 4 << 20


@dataclass(frozen=True)
class SamplingParams:
    """Columns over the rows that sample in one plan."""

    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]  # of the token to be chosen
    temperature: npt.NDArray[np.float32]  # 0: greedy
    top_k: npt.NDArray[np.int32]  # <= 0: off
    top_p: npt.NDArray[np.float32]  # >= 1: off
    min_p: npt.NDArray[np.float32]  # <= 0: off

    def take(self, rows: npt.NDArray[np.intp]) -> SamplingParams:
        """The columns of some rows."""
        return SamplingParams(
            self.seeds[rows],
            self.positions[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
        )


def sample(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """``logits``: fp32 [rows, vocab]. Returns int64 [rows] tokens and fp32 [rows] logprobs.

    The logprob is the model's own, before temperature and filters.
    """
    tokens = logits.argmax(dim=-1)
    drawn = np.flatnonzero(params.temperature > 0)
    if len(drawn):
        rows = to_device(drawn, logits.device)
        every = len(drawn) == len(logits)
        chosen = logits if every else logits.index_select(0, rows)
        tokens[rows] = draw(chosen, params.take(drawn))
    picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    parts = torch.split(logits, _part_rows(logits))
    return tokens, picked - _joined([part.logsumexp(dim=-1) for part in parts])


def _part_rows(logits: Tensor) -> int:
    """How many rows are taken at a time; all on CUDA."""
    if logits.is_cuda:
        return max(len(logits), 1)
    return max(PART_BYTES // (logits.shape[1] * logits.element_size()), 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def draw(logits: Tensor, params: SamplingParams) -> Tensor:
    """Draws one token per row, all with a temperature above 0. Returns int64 [rows]."""
    step = _part_rows(logits)
    if len(logits) <= step:
        return _draw_part(logits, params)
    rows = np.arange(len(logits))
    parts = (slice(first, first + step) for first in range(0, len(logits), step))
    return _joined([_draw_part(logits[part], params.take(rows[part])) for part in parts])


def _draw_part(logits: Tensor, params: SamplingParams) -> Tensor:
    # Against the row's maximum, so that the smallest temperature overflows nothing.
    temperature = _column(params.temperature.clip(min=MIN_TEMPERATURE), logits.device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    filtered = apply_filters(scaled, params)
    # Gumbel's trick, without a second logarithm: argmax(log p + gumbel) = argmax(p / exponential).
    return (filtered.softmax(dim=-1) / exponential_noise(params, logits)).argmax(dim=-1)


def apply_filters(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Sets what min-p, top-k and top-p exclude to -inf. ``scaled``: fp32 [rows, vocab]."""
    if (params.min_p > 0).any():
        min_p = _column(params.min_p, scaled.device)
        floor = scaled.amax(dim=-1, keepdim=True) + min_p.log()  # log 0 = -inf: off
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    vocab = scaled.shape[-1]
    limited = np.flatnonzero((params.top_p < 1) | ((params.top_k > 0) & (params.top_k < vocab)))
    if len(limited) == 0:
        return scaled
    rows = to_device(limited, scaled.device)
    part = scaled.index_select(0, rows)
    lowest = _lowest_kept(part, params.take(limited))
    return scaled.index_copy(0, rows, part.masked_fill(part < lowest, -torch.inf))


def _lowest_kept(scaled: Tensor, params: SamplingParams) -> Tensor:
    """The smallest logit that top-k and then top-p keep: [rows, 1]."""
    vocab = scaled.shape[-1]
    top_k = np.where(params.top_k > 0, params.top_k, vocab).clip(max=vocab).astype(np.int64)
    k = to_device(top_k, scaled.device).unsqueeze(1)
    top_p = _column(params.top_p, scaled.device)
    if scaled.is_cuda:  # sorting all is cheap there, and asking what is complete would wait
        return _lowest_within(scaled, k, top_p, vocab)[0]
    lowest, complete = _lowest_within(scaled, k, top_p, min(CANDIDATES, vocab))
    if not complete.all():
        rows = (~complete).nonzero().squeeze(1)
        lowest[rows], _ = _lowest_within(scaled[rows], k[rows], top_p[rows], vocab)
    return lowest


def _lowest_within(scaled: Tensor, k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As ``_lowest_kept``, from the ``width`` likeliest alone; false for rows that need more."""
    vocab = scaled.shape[-1]
    ordered = scaled.topk(width, dim=-1).values
    kth = ordered.gather(1, k.clamp(max=width) - 1).masked_fill(k == vocab, -torch.inf)
    # top-p is a share of all that top-k left, ties and what lies beyond `width` included.
    total = scaled.masked_fill(scaled < kth, -torch.inf).logsumexp(dim=-1, keepdim=True)
    share = (ordered - total).exp()
    likelier = share.cumsum(dim=-1) - share
    inside = (likelier < top_p) & (ordered >= kth)
    count = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    lowest = torch.where(top_p < 1, ordered.gather(1, count - 1), kth)
    whole = k <= width
    open_ended = (k == vocab) & ((top_p >= 1) | (count < width))
    return lowest, (whole | open_ended).squeeze(1)


def exponential_noise(params: SamplingParams, like: Tensor) -> Tensor:
    """Independent exponential draws, one per row and token: fp32 of the shape of ``like``."""
    rows, vocab = like.shape
    low, high = (_int32_column(half, like.device) for half in row_keys(params))
    bits = torch.arange(vocab, dtype=torch.int32, device=like.device).mul_(_signed(0x9E3779B9))
    bits = _mix(bits.expand(rows, vocab) ^ low)
    bits = _mix(bits.bitwise_xor_(high)).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(-(2.0**-31))  # in [-1, 0), negated
    # The smallest draws decide, and log1p keeps their precision.
    return uniform.log1p_().neg_()


def row_keys(params: SamplingParams) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Two 32-bit halves of a 64-bit key per row, mixed from seed and position (splitmix64)."""
    step = np.uint64(0x9E3779B97F4A7C15)
    key = (
        params.seeds.astype(np.uint64) + (params.positions.astype(np.uint64) + np.uint64(1)) * step
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    key ^= key >> np.uint64(31)
    return (key & np.uint64(0xFFFFFFFF)).astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)


def _mix(bits: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift-multiply) in place. PyTorch shifts in copies of the sign."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits *= _signed(factor)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On the device; through pinned memory, so that the host does not wait for its stream."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _column(values: npt.NDArray[np.float32], device: torch.device) -> Tensor:
    return to_device(values, device).unsqueeze(1)


def _int32_column(words: npt.NDArray[np.uint32], device: torch.device) -> Tensor:
    return to_device(words.view(np.int32), device).unsqueeze(1)
