"""Biases, penalties and log-probabilities on the device, for the rows that want them.

The order is vLLM's: log-probabilities are the model's own, before anything else; then stop tokens
are held back and biases added; then the repetition, frequency and presence penalties; temperature
and filters follow (gpu_worker/sampler.py).

Penalties count the sequence's tokens, kept by slot and position: a row that is done twice writes
the same tokens to the same places, and nothing has to be taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.sampler import SamplingParams, sample, to_device
from gpu_worker.wanted import Biases, Penalties, PromptPart, Recorded, Reported, Wanted

PART = 1 << 24  # elements of counts or logits that are worked on at a time
LEAST_WIDTH = 1024  # tokens of a sequence that are kept room for at first

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Report:
    """Log-probabilities of some tokens, on their way to the host."""

    rows: Ints  # of the plan
    positions: Ints
    n_top: Ints
    ints: Tensor  # int32 [entries, 2 + k]: token, rank, then the likeliest tokens
    floats: Tensor  # fp32 [entries, 1 + k]: the token's, then theirs

    def fetched(self) -> Report:
        """In pinned memory, filled when the device's stream has come so far."""
        copies = []
        for there in (self.ints, self.floats):
            here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
            copies.append(here.copy_(there, non_blocking=True))
        return replace(self, ints=copies[0], floats=copies[1])


class Features:
    """What a gpu worker keeps of sequences that want penalties or their prompt's logprobs."""

    def __init__(
        self,
        device: torch.device,
        max_slots: int,
        max_positions: int,
        vocab_size: int,
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """``logits``: fp32 [n, hidden] residual rows to fp32 [n, vocab]."""
        self._device = device
        self._max_slots = max_slots
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        self._logits = logits
        self._tokens = torch.empty(max_slots, 0, dtype=torch.int32, device=device)
        self._last: dict[int, Tensor] = {}  # by slot: residual row of a prompt that goes on

    def record(self, recorded: Recorded, tokens: Tensor) -> None:
        """Keeps tokens. ``tokens``: of the sub-batch, on the device."""
        self._widen(int(recorded.positions.max()) + 1)
        at, slots, positions = (
            to_device(column, self._device)
            for column in (recorded.at, recorded.slots, recorded.positions)
        )
        self._tokens[slots, positions] = tokens[at].int()

    def _widen(self, wanted: int) -> None:
        width = self._tokens.shape[1]
        if wanted <= width:
            return
        wider = min(max(LEAST_WIDTH, 1 << (wanted - 1).bit_length()), self._max_positions)
        tokens = torch.zeros(
            self._max_slots, max(wider, wanted), dtype=torch.int32, device=self._device
        )
        tokens[:, :width] = self._tokens
        self._tokens = tokens

    def sample(
        self, logits: Tensor, sampling: SamplingParams, wanted: Wanted
    ) -> tuple[Tensor, Tensor]:
        """As ``sampler.sample``, with biases and penalties; the logprobs are the model's own."""
        adjusted = self.adjust(logits, wanted)
        tokens, logprobs = sample(adjusted, sampling)
        if adjusted is logits:
            return tokens, logprobs
        picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens, picked - logits.logsumexp(dim=-1)

    def adjust(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """``logits``: fp32 [sampled rows, vocab], left as they are."""
        if wanted.biases is None and wanted.penalties is None:
            return logits
        logits = logits.clone()
        if wanted.biases is not None:
            self._bias(logits, wanted.biases)
        if wanted.penalties is not None:
            self._penalise(logits, wanted.penalties)
        return logits

    def _bias(self, logits: Tensor, biases: Biases) -> None:
        rows, tokens, values = (
            to_device(column, self._device)
            for column in (biases.rows, biases.tokens, biases.values)
        )
        logits.index_put_((rows, tokens), values, accumulate=True)

    def _penalise(self, logits: Tensor, p: Penalties) -> None:
        longest = int(p.lengths.max())
        step = max(1, PART // max(longest, logits.shape[1]))
        for i in range(0, len(p.rows), step):
            part = slice(i, i + step)
            rows, slots, lengths, prompts = (
                to_device(column[part], self._device)
                for column in (p.rows, p.slots, p.lengths, p.prompts)
            )
            presence, frequency, repetition = (
                to_device(column[part], self._device).unsqueeze(1)
                for column in (p.presence, p.frequency, p.repetition)
            )
            seen, counts = self._counts(slots, lengths, prompts, longest, logits.shape[1])
            mine = logits.index_select(0, rows)
            repeated = torch.where(mine > 0, mine / repetition, mine * repetition)
            mine = torch.where(seen, repeated, mine)
            mine = mine - frequency * counts - presence * (counts > 0)
            logits.index_copy_(0, rows, mine)

    def _counts(
        self, slots: Tensor, lengths: Tensor, prompts: Tensor, longest: int, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Whether a token is in the sequence, and how often in its output: [rows, vocab] each."""
        tokens = self._tokens[:, :longest].index_select(0, slots).long()
        at = torch.arange(longest, device=self._device)
        there, output = at < lengths.unsqueeze(1), at >= prompts.unsqueeze(1)
        # Places that do not count go to a column behind the vocabulary.
        shape = (len(slots), vocab + 1)
        seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        seen.scatter_(1, tokens.masked_fill(~there, vocab), True)
        counts = torch.zeros(shape, dtype=torch.float32, device=self._device)
        ones = torch.ones(1, 1, device=self._device).expand_as(tokens)
        counts.scatter_add_(1, tokens.masked_fill(~(there & output), vocab), ones)
        return seen[:, :vocab], counts[:, :vocab]

    def report(self, logits: Tensor, tokens: Tensor, reported: Reported) -> Report:
        """``logits``: of the sampled rows, the model's own; ``tokens``: drawn from them."""
        at = to_device(reported.sampled, self._device)
        chosen = logits.index_select(0, at), tokens.index_select(0, at).long()
        n_top = reported.n_top
        ints, floats = _logprobs(*chosen, int(n_top.max()))
        return Report(reported.rows, reported.positions, n_top, ints, floats)

    def report_prompt(self, part: PromptPart, residual: Tensor) -> Report | None:
        """``residual``: fp32 [tokens, hidden] of the row, after the last layer.

        A token's logprob comes from the row before it, which for a chunk's first token is kept
        from the chunk before. None: the row holds only a prompt's first token.
        """
        count = len(part.ids)
        before, first = residual[: count - 1], 1
        kept = self._last.pop(part.slot, None)
        if part.start > 0 and kept is not None:
            before, first = torch.cat((kept, before)), 0
        if part.goes_on:
            self._last[part.slot] = residual[count - 1 : count].clone()
        if len(before) == 0:
            return None
        targets = to_device(part.ids[first:], self._device)
        ints, floats = self._in_parts(before, targets, part.n_top)
        positions = part.start + np.arange(first, count)
        full = np.full(len(positions), part.row), positions, np.full(len(positions), part.n_top)
        return Report(*full, ints, floats)

    def _in_parts(self, residual: Tensor, targets: Tensor, n_top: int) -> tuple[Tensor, Tensor]:
        """The logits of a whole prompt would take more memory than its activations."""
        step = max(1, PART // self._vocab_size)
        found = [
            _logprobs(self._logits(residual[i : i + step]), targets[i : i + step], n_top)
            for i in range(0, len(targets), step)
        ]
        return torch.cat([ints for ints, _ in found]), torch.cat([floats for _, floats in found])


def _logprobs(logits: Tensor, tokens: Tensor, n_top: int) -> tuple[Tensor, Tensor]:
    """``logits``: fp32 [n, vocab]; ``tokens``: int64 [n]. See ``Report``."""
    picked = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > picked).sum(dim=-1, keepdim=True) + 1
    total = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(n_top, dim=-1)
    ints = torch.cat((tokens.unsqueeze(1), ranks, top.indices), dim=1).int()
    return ints, torch.cat((picked, top.values), dim=1) - total
