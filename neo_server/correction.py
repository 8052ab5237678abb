"""Corrects a cost model from the measured stage times of every iteration.

Each kind of stage has one factor, a running geometric mean of measured over predicted, so that a
profile that is wrong by 4x is right after some tens of iterations. Factors are bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from statistics import median

from neo_server.cost_model import CostModel, Stages
from neo_server.step import StageTimes, StepResult
from neo_server.step_cost import StepLoad
from neo_server.table_cost import TableCost

FACTORS = (
    *("linear", "prefill_attn", "gpu_attn", "cpu_attn", "ride_attn", "handoff", "transfer"),
    *("staging", "head"),
)
BOUND = 16.0  # a factor stays within [1/BOUND, BOUND]
_LEAST_S = 1e-9  # where no stage takes any time
_WEIGHT = 0.08  # of the newest iteration
_PROFILED = 3.0  # iterations that the profile counts for: a cold first one does not outweigh it
_OUTLIER = 3.0  # a single iteration moves a factor as if it were off by this much at most
_WINDOW = 64  # iterations that the error is a median of
_LEAST_BUSY = 0.2  # of an iteration, that riders must be thought to take to be learned from
_LEAST_SHARE = 0.02  # of an iteration, that a stage must take to be learned from
# Where riders' attention should take this much of an iteration and none was late (by more than
# _LEAST_SHARE), it is believed to take less by so much, until some are.
_PROBED, _PROBE = 0.8, 1e-3
# Of an iteration, that what later chunks fetch must take by the profile to be learned from as its
# rest: errors of all others are in it.
_LEAST_FETCHED = 0.05


class CorrectedCost:
    """A ``CostModel`` times factors.

    Of what the candidates of one plan ask of it, three quarters have been asked before, so the
    base's answers are kept until ``refresh``.
    """

    def __init__(self, base: CostModel) -> None:
        self.base = base
        self._linear = lru_cache(None)(base.linear)
        self._prefill_attn = lru_cache(None)(base.prefill_attn)
        self._gpu_attn = lru_cache(None)(base.gpu_attn)
        self._cpu_attn = lru_cache(None)(base.cpu_attn)
        self._ride_attn = lru_cache(None)(base.ride_attn)
        self._handoff = lru_cache(None)(base.handoff)
        self._ride_handoff = lru_cache(None)(base.ride_handoff)
        self._transfer = lru_cache(None)(base.transfer)
        self._staging = lru_cache(None)(base.staging)
        self._storing = lru_cache(None)(base.storing)
        self._head = lru_cache(None)(base.head)
        self.factors = dict.fromkeys(FACTORS, 1.0)
        # Iterations that each was learned from.
        self._seen = dict.fromkeys(FACTORS, _PROFILED)
        self._errors: deque[float] = deque(maxlen=_WINDOW)

    @property
    def num_layers(self) -> int:
        """The base's."""
        return self.base.num_layers

    @property
    def overlaps_transfers(self) -> bool:
        """The base's."""
        return self.base.overlaps_transfers

    @property
    def ride_places(self) -> float:
        """The base's."""
        return self.base.ride_places

    @property
    def median_error(self) -> float:
        """Median of |predicted - measured| / measured over the latest iterations."""
        return median(self._errors) if self._errors else 0.0

    def linear(self, tokens: float) -> float:
        """T_l."""
        return self.factors["linear"] * self._linear(tokens)

    def prefill_attn(self, pairs: float) -> float:
        """Of that many query-key pairs."""
        return self.factors["prefill_attn"] * self._prefill_attn(pairs)

    def gpu_attn(self, rows: float, tokens: float) -> float:
        """T_ga of decodes."""
        return self.factors["gpu_attn"] * self._gpu_attn(rows, tokens)

    def cpu_attn(self, rows: float, tokens: float) -> float:
        """T_ca."""
        return self.factors["cpu_attn"] * self._cpu_attn(rows, tokens)

    def ride_attn(self, rows: float, tokens: float) -> float:
        """T_ca of riders."""
        return self.factors["ride_attn"] * self._ride_attn(rows, tokens)

    def handoff(self, rows: float) -> float:
        """Of one sub-batch."""
        return self.factors["handoff"] * self._handoff(rows)

    def ride_handoff(self, rows: float) -> float:
        """Of one group of riders."""
        return self.factors["handoff"] * self._ride_handoff(rows)

    def transfer(self, tokens: float) -> float:
        """Between the caches."""
        return self.factors["transfer"] * self._transfer(tokens)

    def staging(self, tokens: float) -> float:
        """Of earlier chunks."""
        return self.factors["staging"] * self._staging(tokens)

    def storing(self, tokens: float) -> float:
        """Of prefills on the CPU: a hand-off without an answer."""
        return self.factors["handoff"] * self._storing(tokens)

    def head(self, sampled: float) -> float:
        """Per iteration."""
        return self.factors["head"] * self._head(sampled)

    def refresh(self) -> None:
        """Before each plan."""
        if isinstance(self.base, TableCost):
            self.base.refresh()
        for kept in (
            *(self._linear, self._prefill_attn, self._gpu_attn, self._cpu_attn),
            *(self._ride_attn, self._handoff, self._ride_handoff, self._transfer),
            *(self._staging, self._storing, self._head),
        ):
            kept.cache_clear()

    def learn(self, load: StepLoad, predicted_s: float, result: StepResult) -> None:
        """``predicted_s``: what this model said when the step was planned."""
        measured = result.elapsed_s
        if measured <= 0.0:
            return
        self._errors.append(abs(predicted_s - measured) / measured)
        layers = self.num_layers
        stages = load.stages(self)
        times = result.times
        floor = _LEAST_SHARE * measured
        if sum(times.linear) <= 0.0:
            self._learn_untimed(load, stages, measured, times, floor)
            return
        moved = sum(batch.moved + batch.awaited for batch in load.batches)
        self._compare("linear", layers * sum(s.linear for s in stages), sum(times.linear), floor)
        self._learn_attention(load, layers, sum(times.gpu_attn), floor)
        self._compare("handoff", layers * sum(s.handoff for s in stages), times.handoff, floor)
        if not self.overlaps_transfers and times.swap > 0.0:
            self._compare("transfer", layers * self.transfer(moved), times.swap, floor)
        self._compare("head", self.head(load.sampled), times.head, 0.0)
        if load.ride.cpu_rows:
            self._learn_riders(load, times, measured, floor)
        else:
            self._learn_cpu(stages, layers, times, floor)

    def _learn_untimed(
        self,
        load: StepLoad,
        stages: list[Stages],
        measured: float,
        times: StageTimes,
        floor: float,
    ) -> None:
        """Of a device that times no stages, only how long it waited for the cpu workers.

        The rest of the iteration is the sum of its stages, whatever their order: each is corrected
        by its predicted share of it, so that iterations of different kinds tell stages apart. Not
        learned from: iterations with copies between the caches, which no sum accounts for; what
        prefills on the CPU store is part of the sum where it was measured. Late riders are waited
        for beside the GPU's attention, so that no sum is left then.

        What later chunks on the CPU fetch has no other witness: iterations with them tell it alone.
        """
        staging, stored = self._fetched(load), sum(batch.stored for batch in load.batches)
        if load.swaps or (stored and not staging and not self.storing(stored)):
            return
        if times.ride_wait > floor:
            self._learn_riders(load, times, measured, floor)
            return
        waited = sum(times.cpu_wait) + times.ride_wait
        layers, work = self.num_layers, max(measured - waited, 0.0)
        parts = {
            "linear": layers * sum(s.linear for s in stages),
            "prefill_attn": layers
            * sum(self.prefill_attn(b.pairs) for b in load.batches if b.pairs),
            "handoff": layers * sum(s.handoff for s in stages),
            "head": self.head(load.sampled),
        }
        parts["gpu_attn"] = layers * sum(s.gpu_attn for s in stages) - parts["prefill_attn"]
        total = sum(parts.values())
        if total <= 0.0 or work <= 0.0:
            return
        if staging:
            if staging > _LEAST_FETCHED * measured * self.factors["staging"]:
                self._move("staging", (work - (total - staging)) / staging)
            return
        for name, seconds in parts.items():
            self._move(name, work / total, seconds / total)
        scale = work / total * layers
        shared_out = StageTimes(
            linear=_pair(scale * s.linear for s in stages),
            gpu_attn=_pair(scale * s.gpu_attn for s in stages),
            cpu_wait=times.cpu_wait,
            ride_wait=times.ride_wait,
            handoff=scale * sum(s.handoff for s in stages),
        )
        if load.ride.cpu_rows:
            self._learn_riders(load, shared_out, measured, floor)
        else:
            self._learn_cpu(stages, layers, shared_out, floor)

    def _fetched(self, load: StepLoad) -> float:
        """Seconds that its later chunks on the CPU fetch."""
        return self.num_layers * sum(self.staging(b.staged) for b in load.batches if b.staged)

    def _learn_attention(self, load: StepLoad, layers: int, measured: float, floor: float) -> None:
        """One measured time for three kinds of stage: each is corrected by its predicted share."""
        prefill = layers * sum(self.prefill_attn(b.pairs) for b in load.batches if b.pairs)
        decode = layers * sum(
            self.gpu_attn(b.gpu_rows, b.gpu_tokens) for b in load.batches if b.gpu_rows
        )
        staging = self._fetched(load)
        total = prefill + decode + staging
        if total <= 0.0 or max(measured, total) < floor:
            return
        self._move("prefill_attn", measured / total, prefill / total)
        self._move("gpu_attn", measured / total, decode / total)
        if staging:
            self._move("staging", measured / total, staging / total)

    def _learn_cpu(
        self, stages: list[Stages], layers: int, times: StageTimes, floor: float
    ) -> None:
        """T_ca is seen only where the device waited; else what it hid in is an upper bound.

        Of two sub-batches one's attention may have stood in the queue behind the other's, so the
        factor is the one with which ``layer_time`` gives the time that the layers took.
        """
        predicted = [layers * stage.cpu_attn for stage in stages]
        if sum(predicted) <= 0.0 or not math.isfinite(sum(predicted)):
            return
        wait = sum(times.cpu_wait)
        if len(stages) == 1:
            room = [(times.gpu_attn[0] + wait, predicted[0])]
        else:
            whole = sum(times.linear) + sum(times.gpu_attn) + times.handoff + wait
            handoff = times.handoff / max(sum(stage.handoff for stage in stages), _LEAST_S)
            own = [times.linear[i] + handoff * stages[i].handoff for i in range(2)]
            room = [(whole - own[i], predicted[i]) for i in range(2)]
            room.append((whole, sum(predicted)))
        ratio = min(seconds / needed for seconds, needed in room if needed > 0.0)
        if ratio > 0.0 and (wait > floor or ratio < 1.0):
            self._move("cpu_attn", ratio)

    def _learn_riders(
        self, load: StepLoad, times: StageTimes, measured: float, floor: float
    ) -> None:
        """Riders' attention has the whole iteration: a wait means that it took all of it.

        Unless it should have taken little: then something else was late, not the attention slow.
        Without a wait it took less, and nobody says how much: that is found out by believing it.
        """
        predicted = self.ride_attn(load.ride.cpu_rows, load.ride.cpu_tokens)
        if predicted <= 0.0 or not math.isfinite(predicted):
            return
        ratio, late = measured / predicted, times.ride_wait > floor
        if ratio < 1.0 or (late and ratio < 1.0 / _LEAST_BUSY):
            self._move("ride_attn", ratio)
        elif not late and ratio < 1.0 / _PROBED:
            less = self.factors["ride_attn"] * (1.0 - _PROBE)
            self.factors["ride_attn"] = max(less, 1.0 / BOUND)

    def _compare(self, name: str, predicted: float, measured: float, floor: float) -> None:
        if predicted > 0.0 and measured > 0.0 and max(predicted, measured) >= floor:
            self._move(name, measured / predicted)

    def _move(self, name: str, ratio: float, share: float = 1.0) -> None:
        ratio = min(max(ratio, 1.0 / _OUTLIER), _OUTLIER)
        self._seen[name] += share
        weight = max(_WEIGHT, 1.0 / (1.0 + self._seen[name]))  # the first ones count for more
        factor = self.factors[name] * ratio ** (weight * share)
        self.factors[name] = min(max(factor, 1.0 / BOUND), BOUND)


def _pair(seconds: Iterable[float]) -> tuple[float, float]:
    """By sub-batch; 0 where there is none."""
    first, second = (*seconds, 0.0, 0.0)[:2]
    return first, second
