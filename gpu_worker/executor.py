"""Runs one plan: one sub-batch, or two interleaved (arXiv 2411.01142, section 3.1).

Per layer and sub-batch: wait for the O that the cpu workers owe from the layer before, linear
stage, K and V into the caches, Q to the cpu workers, attention on the device. With two sub-batches
each one's device work hides the other's CPU attention, which needs no barrier: the only waits are
those for a sub-batch's own O. Riders pass their stage with the first sub-batch (``riders.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import Plan, PlannedSwap, PrefillRow, SubBatch
from gpu_worker.features import Features, Report
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import Activations, LlamaModel
from gpu_worker.offload import Offload
from gpu_worker.riders import RiderGroup, RideStore, Riding, linear_stage, with_room
from gpu_worker.sampler import sample
from gpu_worker.timeline import Recorder
from gpu_worker.timing import StageTimer, StageTimes
from neo_native import RowStatus, SwapKind
from neo_native.timeline import Timeline


def _no_rows(device: torch.device) -> SubBatch:
    """The sub-batch that riders pass with when there is none."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    return SubBatch(0, slice(0, 0), none, none, (), (), None, None, none)


@dataclass(frozen=True)
class Outcome:
    """What a plan gave, by row of the plan."""

    plan_id: int
    slots: npt.NDArray[np.uint32]
    status: npt.NDArray[np.uint32]  # RowStatus
    tokens: npt.NDArray[np.int32]  # -1 unless sampled
    logprobs: npt.NDArray[np.float32]  # 0 unless sampled
    times: StageTimes
    cpu_tasks: int  # attention tasks given to the cpu workers, over all layers
    reports: tuple[Report, ...] = ()  # log-probabilities that were asked for

    def void(self, rows: npt.NDArray[np.intp] | int) -> None:
        """Takes back what these rows gave."""
        self.status[rows] = RowStatus.VOIDED
        self.tokens[rows] = -1
        self.logprobs[rows] = 0.0


class Continuation:
    """What was sampled last, by slot: the tokens of rows that were planned before it was known.

    A row whose predecessor was void is void too.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # of slots whose latest row that samples was not void

    def fill(self, plan: Plan) -> list[int]:
        """Puts the tokens into sub-batches and riders; returns the rows that have none."""
        lost: list[int] = []
        parts: tuple[SubBatch | RiderGroup, ...] = (*plan.sub_batches, *plan.riders)
        for sub in parts:
            if (rows := sub.continued) is None:
                continue
            tokens = np.array([self._tokens.get(slot, -1) for slot in rows.slots.tolist()])
            lost += rows.rows[tokens < 0].tolist()
            there = torch.from_numpy(rows.tokens[tokens >= 0]).to(sub.tokens.device)
            sub.tokens[there] = torch.from_numpy(tokens[tokens >= 0]).to(sub.tokens.device)
        return lost

    def keep(
        self, plan: Plan, tokens: npt.NDArray[np.int64], status: npt.NDArray[np.uint32]
    ) -> None:
        """``tokens``: of the sampled rows."""
        slots = plan.slots[plan.sampled_rows].tolist()
        sampled = (status[plan.sampled_rows] == RowStatus.SAMPLED).tolist()
        for slot, token, there in zip(slots, tokens.tolist(), sampled, strict=True):
            if there:
                self._tokens[slot] = token
            else:
                self._tokens.pop(slot, None)


class Executor:
    """The device's side of every iteration."""

    def __init__(
        self,
        model: LlamaModel,
        cache: GpuCache,
        offload: Offload,
        features: Features,
        ride_groups: int = 0,
        ride_capacity: int = 0,
    ) -> None:
        """``ride_groups``, ``ride_capacity``: as in the shared geometry; 0: no riders."""
        hidden = model.config.hidden_size
        self._rides = RideStore(ride_groups, ride_capacity, hidden, model.device)
        self._model = model
        self._features = features
        self._ops = model.ops
        self._scale = model.config.attention_scale
        self._n_layers = model.config.num_hidden_layers
        self._cache = cache
        self._offload = offload
        self._continuation = Continuation()
        self._done: Outcome | None = None
        self._recorder: Recorder | None = None

    @property
    def pending(self) -> int:
        """Plans submitted and not collected."""
        return int(self._done is not None)

    @property
    def full(self) -> bool:
        """No plan can be submitted before one is collected."""
        return self._done is not None

    def ready(self) -> bool:
        """The oldest plan is through."""
        return self._done is not None

    def summary(self) -> str:
        """How plans ran so far, for the log."""
        return "computed as they came"

    def submit(self, plan: Plan) -> None:
        """Computes the plan and keeps what it gave."""
        self._done = self.run(plan)

    def collect(self) -> Outcome:
        """What the submitted plan gave."""
        assert self._done is not None, "collect without submit"
        done, self._done = self._done, None
        return done

    def record(self, timeline: Timeline) -> None:
        """From now on the plans that it asks for are recorded."""
        self._recorder = Recorder(timeline, lambda: self._offload.tasks)

    def _timer(self, plan_id: int) -> StageTimer:
        timer = self._recorder.timer(plan_id) if self._recorder else None
        return timer or StageTimer(muted=self._model.device.type == "cuda")

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Computes the plan and waits for it."""
        timer = self._timer(plan.plan_id)
        lost = self._continuation.fill(plan)
        for channel, recorded in (plan.wanted.recorded if plan.wanted else {}).items():
            self._features.record(recorded, _of_channel(plan, channel).tokens)
        for group in plan.riders:
            if group.recorded is not None:
                self._features.record(group.recorded, group.tokens)
        self._offload.begin(plan)
        riding = Riding(plan.riders, lost, self._rides, self._model, self._offload)
        try:
            residuals = self._forward(plan, riding, timer)
        finally:
            self._offload.end()
        drawn, logprobs, reports = self._sample(plan, residuals, riding.sampled())
        tokens = drawn.cpu().numpy()
        timer.lap("head")
        outcome = self._outcome(plan, tokens, logprobs.cpu().numpy(), timer.stop(), reports)
        for row in lost:
            outcome.void(row)
        outcome.void(riding.void_rows())
        self._continuation.keep(plan, tokens, outcome.status)
        return outcome

    def _forward(self, plan: Plan, riding: Riding, timer: StageTimer) -> list[Tensor]:
        """The residual rows after the last layer, per sub-batch."""
        subs = plan.sub_batches or (_no_rows(self._model.device),)
        batches = [(sub, self._model.embed(sub.tokens, sub.positions)) for sub in subs]
        batches[0] = subs[0], with_room(batches[0][1], riding.room)
        timer.lap("head")
        for layer in range(self._n_layers):
            timer.layer = layer
            for swap in plan.swaps:
                self._swap(layer, swap)
            timer.lap("swap")
            for sub, x in batches:
                self._linear(sub, x, riding if x is batches[0][1] else None, layer, timer)
                self._attend(sub, x, layer)
                timer.lap("gpu_attn", sub.channel)
        timer.layer = self._n_layers
        for sub, x in batches:
            self._linear(sub, x, riding if x is batches[0][1] else None, self._n_layers, timer)
        return [x.residual for _, x in batches][: len(plan.sub_batches)]

    def _linear(
        self, sub: SubBatch, x: Activations, riding: Riding | None, layer: int, timer: StageTimer
    ) -> None:
        """A linear stage with what it needs from the cpu workers and gives to them."""
        n = rows = len(sub.tokens)
        self._join(sub, x, layer, timer)
        if riding is not None:
            rows = riding.join(x, n, layer, timer)
            timer.lap("handoff")
        if rows:
            linear_stage(self._model, x, rows, layer)
        timer.lap("linear", sub.channel)
        if layer < self._n_layers:
            self._hand_off(sub, x, layer)
        if riding is not None:
            riding.leave(x, n, layer)
        timer.lap("handoff")

    def _join(self, sub: SubBatch, x: Activations, layer: int, timer: StageTimer) -> None:
        """Waits for O of the layer before; a void channel's rows go on with zeros, unused."""
        if sub.cpu_decodes is None or layer == 0:
            return
        out = x.attn[sub.cpu_decodes.tokens]
        done = self._offload.wait(sub.channel)
        timer.lap("cpu_wait", sub.channel)
        if done:
            self._offload.collect(sub.channel, out)
        else:
            out.zero_()
        timer.lap("handoff")

    def _hand_off(self, sub: SubBatch, x: Activations, layer: int) -> None:
        """K and V into the caches they belong to, then Q to the cpu workers."""
        for tokens, index in sub.stores:
            self._cache.store(layer, index, x.k[tokens], x.v[tokens])
        for row in sub.prefills:
            if row.on_cpu:
                k, v = x.k[row.tokens], x.v[row.tokens]
                self._offload.store_span(layer, row.slot, row.start, k, v)
        if (rows := sub.cpu_decodes) is not None:
            self._offload.store_rows(layer, rows, x.k[rows.tokens], x.v[rows.tokens])
            self._offload.publish(sub.channel, layer, x.q[rows.tokens])

    def _attend(self, sub: SubBatch, x: Activations, layer: int) -> None:
        for row in sub.prefills:
            k, v = self._prefill_kv(row, x, layer)
            x.attn[row.tokens] = self._ops.prefill_attention(
                x.q[row.tokens], k, v, row.mask, self._scale
            )
        if (rows := sub.gpu_decodes) is not None:
            x.attn[rows.tokens] = self._ops.decode_attention(
                x.q[rows.tokens],
                *self._cache.layer(layer),
                rows.block_table,
                rows.mask,
                self._scale,
            )

    def _prefill_kv(self, row: PrefillRow, x: Activations, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the whole sequence so far: earlier chunks from their cache, then the new."""
        k, v = x.k[row.tokens], x.v[row.tokens]
        if row.start == 0:
            return k, v
        if row.earlier is None:
            earlier_k, earlier_v = self._offload.load_span(layer, row.slot, row.start)
        else:
            earlier_k, earlier_v = self._cache.load(layer, row.earlier)
        return torch.cat((earlier_k, k)), torch.cat((earlier_v, v))

    def _swap(self, layer: int, swap: PlannedSwap) -> None:
        if swap.kind is SwapKind.OUT:
            self._offload.store_span(layer, swap.slot, 0, *self._cache.load(layer, swap.index))
        else:
            k, v = self._offload.load_span(layer, swap.slot, len(swap.index))
            self._cache.store(layer, swap.index, k, v)

    def _sample(
        self, plan: Plan, residuals: list[Tensor], ridden: list[Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Report, ...]]:
        """Tokens and logprobs of the sampled rows, and the reports that were asked for.

        ``ridden``: residual rows of the riders that are sampled.
        """
        wanted = plan.wanted
        reports = [] if wanted is None else self._prompt_reports(plan, residuals)
        if len(plan.sampled_rows) == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0), tuple(reports)
        pairs = zip(plan.sub_batches, residuals, strict=True)
        logits = self._model.logits(torch.cat([x[sub.sampled] for sub, x in pairs] + ridden))
        if wanted is None:
            return *sample(logits, plan.sampling), ()
        tokens, logprobs = self._features.sample(logits, plan.sampling, wanted)
        if wanted.reported is not None:
            reports.append(self._features.report(logits, tokens, wanted.reported))
        return tokens, logprobs, tuple(reports)

    def _prompt_reports(self, plan: Plan, residuals: list[Tensor]) -> list[Report]:
        assert plan.wanted is not None
        by_channel = {sub.channel: x for sub, x in zip(plan.sub_batches, residuals, strict=True)}
        reports = (
            self._features.report_prompt(part, by_channel[part.channel][part.tokens])
            for part in plan.wanted.prompts
        )
        return [report for report in reports if report is not None]

    def _outcome(
        self,
        plan: Plan,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        times: StageTimes,
        reports: tuple[Report, ...],
    ) -> Outcome:
        n_rows = len(plan.slots)
        outcome = Outcome(
            plan_id=plan.plan_id,
            slots=plan.slots,
            status=np.full(n_rows, RowStatus.COMPUTED, np.uint32),
            tokens=np.full(n_rows, -1, np.int32),
            logprobs=np.zeros(n_rows, np.float32),
            times=times,
            cpu_tasks=self._offload.tasks,
            reports=reports,
        )
        outcome.status[plan.sampled_rows] = RowStatus.SAMPLED
        outcome.tokens[plan.sampled_rows] = tokens
        outcome.logprobs[plan.sampled_rows] = logprobs
        for sub in plan.sub_batches:
            if sub.channel in self._offload.voided and sub.cpu_decodes is not None:
                void = np.arange(sub.rows.stop - len(sub.cpu_decodes.slots), sub.rows.stop)
                outcome.void(void)
        return outcome


def _of_channel(plan: Plan, channel: int) -> SubBatch:
    return next(sub for sub in plan.sub_batches if sub.channel == channel)
