"""What perfect packing would give: a bound on throughput under a cost model, by a linear programme.

Requests that are all alike come without end; any mix of iterations is allowed that in sum prefills
each prompt and decodes each output. No ramp, no fragmentation, no growth of a cache, no order of
arrival. Sequences count with their mean length, below which no schedule can come on average: an
iteration's time is convex in its load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from neo_server.cost_model import CostModel, Load, Ride, iteration_time
from neo_server.plan import Mode
from neo_server.riders import group_capacity

_SHARES = tuple(i / 16 for i in range(17))  # of the CPU rows, in batch-1


@dataclass(frozen=True, slots=True)
class Packing:
    """What is packed."""

    num_prompt: int
    num_output: int
    gpu_tokens: int
    cpu_tokens: int
    max_num_seqs: int
    prefills: tuple[float, ...]  # prompt tokens that an iteration may hold; 0 among them
    modes: frozenset[Mode]

    @property
    def mean_tokens(self) -> float:
        """Of a sequence that decodes."""
        return self.num_prompt + self.num_output / 2


def ideal_rate(cost: CostModel, packing: Packing) -> float:
    """Requests per second that no schedule of ``packing.modes`` exceeds in the long run.

    The least time of a request over mixes of iterations with enough decodes and prefills; two
    constraints, so no more than two kinds of iteration take part.
    """
    kinds = np.array(list(_iterations(cost, packing)))  # [kinds, (seconds, decodes, prompt)]
    seconds, decodes, prompt = kinds.T
    need = (packing.num_output - 1.0, float(packing.num_prompt))  # a prefill gives the first
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = seconds * np.maximum(need[0] / decodes, need[1] / prompt)
        cross = np.outer(decodes, prompt)
        determinant = cross - cross.T
        first = (need[0] * prompt[None, :] - need[1] * decodes[None, :]) / determinant
        second = (need[1] * decodes[:, None] - need[0] * prompt[:, None]) / determinant
        pair = first * seconds[:, None] + second * seconds[None, :]
    pair[~((first >= 0.0) & (second >= 0.0) & np.isfinite(pair))] = np.inf
    return 1.0 / float(min(np.nanmin(alone), pair.min()))


def _iterations(cost: CostModel, packing: Packing) -> Iterator[tuple[float, float, float]]:
    """(seconds, decoded tokens, prompt tokens) of the best iteration with so many CPU rows."""
    mean = packing.mean_tokens
    most = min(packing.gpu_tokens / mean, float(packing.max_num_seqs))
    for rows, prompt in product((0.0, most), packing.prefills):
        base = Load(rows + prompt, prompt * packing.num_prompt / 2, rows, rows * mean)
        base.sampled = rows + prompt / packing.num_prompt
        if base.tokens:
            yield iteration_time(cost, [base]), rows, prompt
        for count in _counts(packing, packing.max_num_seqs - rows):
            for seconds, decoded in _offloaded(cost, packing, base, count):
                yield seconds, rows + decoded, prompt


def _counts(packing: Packing, seats: float) -> list[float]:
    """CPU rows to look at: all that fit, and fewer in steps of an eighth."""
    count = min(seats, packing.cpu_tokens / packing.mean_tokens)
    found = []
    while count >= 1.0:
        found.append(count)
        count /= 1.125
    return found


def _offloaded(
    cost: CostModel, packing: Packing, base: Load, count: float
) -> Iterator[tuple[float, float]]:
    mean = packing.mean_tokens
    if Mode.ONE_BATCH in packing.modes:
        yield iteration_time(cost, [base.with_cpu(count, count * mean)]), count
    if Mode.TWO_BATCHES in packing.modes:
        yield min(_pipeline(cost, base, count, mean, share) for share in _SHARES), count
    if Mode.PIGGYBACK in packing.modes and base.tokens:
        groups = cost.num_layers + 1
        capacity = group_capacity(groups, packing.max_num_seqs)
        ride = Ride.spread(count, count * mean, groups, capacity)
        yield iteration_time(cost, [base], ride), count / groups


def _pipeline(cost: CostModel, base: Load, count: float, mean: float, share: float) -> float:
    second = share * count
    first = count - second
    loads = [base.with_cpu(first, first * mean) if first else base, Load()]
    loads[1] = loads[1].with_cpu(second, second * mean)
    return iteration_time(cost, [load for load in loads if load.tokens])
