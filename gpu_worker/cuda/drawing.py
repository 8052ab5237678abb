"""What follows an iteration's logits where its greedy tokens are not the answer.

Plain PyTorch on the current stream, behind the graph: rows with a temperature, biases or penalties
get another token; log-probabilities are copied out for rows that want them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.plan import HostBatch, HostPlan
from gpu_worker.features import Features, Report
from gpu_worker.sampler import draw, sample, to_device
from gpu_worker.wanted import Wanted

Rows = npt.NDArray[np.intp]


class Drawing:
    """One per executor."""

    def __init__(self, buffers: Buffers, features: Features) -> None:
        self._buffers = buffers
        self._features = features

    def record(self, plan: HostPlan) -> None:
        """Keeps tokens that penalties count. Before the iteration, which samples the next ones."""
        for channel, recorded in (plan.wanted.recorded if plan.wanted else {}).items():
            lead = next(batch.lead for batch in plan.batches if batch.channel == channel)
            self._features.record(recorded, self._tokens(channel)[lead:])
        first = plan.rides.first if plan.rides else None
        if first is not None and first.recorded is not None:
            self._features.record(first.recorded, self._tokens(0))

    def _tokens(self, channel: int) -> Tensor:
        fields = self._buffers.channels[channel].fields
        ids, slots = fields["ids"], fields["slots"].long()
        return torch.where(ids < 0, self._buffers.last_tokens[slots], ids)

    def prompt_reports(self, plan: HostPlan, shape: Shape) -> Iterator[Report]:
        """Of one sub-batch, after its last layer and before the next one's uses its buffers."""
        channel, delta = self._buffers.channels[shape.channel], self._buffers.delta
        for part in plan.wanted.prompts if plan.wanted else ():
            if part.channel == shape.channel:
                of = slice(part.tokens.start + shape.lead, part.tokens.stop + shape.lead)
                residual = channel.residual[of] + delta[of].float()
                report = self._features.report_prompt(part, residual)
                if report is not None:
                    yield report

    def draw(self, plan: HostPlan) -> list[Report]:
        """Replaces tokens; returns what was asked for beside them."""
        if plan.wanted is not None:
            return self._draw_wanted(plan, plan.wanted)
        drawn = np.flatnonzero(plan.sampling.temperature > 0)
        for batch, mine, first in self._by_batch(plan, drawn):
            rows = to_device(mine - first, self._buffers.logits.device)
            logits = self._buffers.logits[batch.channel].index_select(0, rows).float()
            tokens = draw(logits, plan.sampling.take(mine))
            self._put(batch, rows, tokens, _logprobs(logits, tokens))
        return []

    def _draw_wanted(self, plan: HostPlan, wanted: Wanted) -> list[Report]:
        if len(plan.sampled_rows) == 0:
            return []
        b = self._buffers
        logits = torch.cat([b.logits[x.channel, : x.n_sampled] for x in plan.batches]).float()
        adjusted = self._features.adjust(logits, wanted)
        drawn = np.union1d(np.flatnonzero(plan.sampling.temperature > 0), wanted.adjusted)
        for batch, mine, first in self._by_batch(plan, drawn):
            at = to_device(mine, logits.device)
            tokens, _ = sample(adjusted.index_select(0, at), plan.sampling.take(mine))
            logprobs = _logprobs(logits.index_select(0, at), tokens)
            self._put(batch, at - first, tokens, logprobs)
        if wanted.reported is None:
            return []
        chosen = torch.cat([b.tokens_out(x.channel)[: x.n_sampled] for x in plan.batches])
        return [self._features.report(logits, chosen, wanted.reported)]

    @staticmethod
    def _by_batch(plan: HostPlan, rows: Rows) -> Iterator[tuple[HostBatch, Rows, int]]:
        """Which of the plan's sampled rows are a batch's, and the batch's first."""
        first = 0
        for batch in plan.batches:
            mine = rows[(rows >= first) & (rows < first + batch.n_sampled)]
            if len(mine):
                yield batch, mine, first
            first += batch.n_sampled

    def _put(self, batch: HostBatch, rows: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        b = self._buffers
        b.tokens_out(batch.channel)[rows] = tokens.int()
        b.logprobs_out(batch.channel)[rows] = logprobs
        slots = b.channels[batch.channel].fields["sample_slots"][rows]
        b.last_tokens[slots.long()] = tokens.int()


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return picked - logits.logsumexp(dim=-1)
