"""Asks the policy for a plan, checks it, has it carried out on the queues.

Iteration i+1 is planned while i runs: a row that samples leaves its sequence one token longer at
once, and ``update`` fills the token in. What turns out otherwise (a finished or preempted sequence,
a void row) raises the sequence's epoch, so that its rows in flight count for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from neo_native import RowKind, RowStatus
from neo_server.block_manager import BlockManager
from neo_server.columns import Waiting
from neo_server.correction import CorrectedCost
from neo_server.errors import PlanError
from neo_server.geometry import PLANS_IN_FLIGHT
from neo_server.metrics import Metrics
from neo_server.plan import Ints, Mode, Plan, Rows, View
from neo_server.plan_check import check_plan
from neo_server.policies import Policy
from neo_server.queues import Queues
from neo_server.recent import Awaited, Gaps, Recent
from neo_server.request import Sequence, State
from neo_server.riders import Riders
from neo_server.step import Step, StepResult, StepSwap
from neo_server.step_cost import StepLoad, load_of_step
from protos.config import SchedulerConfig

# Looking an enumerator up takes longer than the rest of what is done for a row.
_VOIDED = int(RowStatus.VOIDED)
_DECODE_GPU, _DECODE_CPU = int(RowKind.DECODE_GPU), int(RowKind.DECODE_CPU)
_RIDE_CPU = int(RowKind.RIDE_CPU)
# From a device's end of an iteration until the next plan made is submitted: notice and report, take
# in and publish, plan, read, submit. docs/decisions.md has the parts.
HOST_CHAIN_S = 8e-3
RUNNABLE = frozenset((Mode.GPU_ONLY, Mode.ONE_BATCH, Mode.TWO_BATCHES))


class Scheduler(Queues):
    """First come, first served queues under one policy. Lives on the event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        blocks: BlockManager,
        max_swaps: int,
        cpu_workers: Callable[[], int],
        cost: CorrectedCost,
        modes: frozenset[Mode] = RUNNABLE,
        clock: Callable[[], float] = time.monotonic,
        ride_groups: int = 0,
    ) -> None:
        """``modes``: kinds of plan that the gpu worker can run. ``clock``: seconds.

        ``ride_groups``: the model's layers + 1; of ``config.ride_capacity`` riders each.
        """
        self.config = config
        self.policy = policy
        super().__init__(blocks)
        self.cost = cost
        self.riders = Riders(ride_groups, config.ride_capacity)
        self.modes = modes if self.riders.capacity else modes - {Mode.PIGGYBACK}
        self.in_flight = 0  # plans that have not reported
        self._clock = clock
        self._recent = Recent()
        target = config.ttft_slo_s
        self._awaited = None if target is None else Awaited(target)
        self._max_swaps = max_swaps
        self._cpu_workers = cpu_workers
        self._plan_id = 0
        self._expected: dict[int, tuple[StepLoad, float]] = {}
        self._kept: dict[str, tuple[int, int]] = {}
        self._gaps = Gaps()

    @property
    def max_tokens_per_sequence(self) -> int:
        """Prompt and output together: max_model_len, or what the larger usable cache holds."""
        # The last token of a sequence is never put into a cache.
        capacity = self.blocks.capacity(self.policy.places) + 1
        return min(self.config.max_model_len, capacity)

    @property
    def wants_plan(self) -> bool:
        """A plan should be made now: what follows the oldest in flight is over too soon otherwise.

        When the oldest reports, the device still has the others to do, while the host makes a new
        plan. An arrival waits for all of them, so the last is made only while others wait as well,
        or where the host was late lately.
        """
        one_more = bool(self.waiting) or self._gaps.often
        most = PLANS_IN_FLIGHT if one_more else min(PLANS_IN_FLIGHT, 2)
        if not self.has_work or self.in_flight >= most:
            return False
        following = list(self._expected.values())[1:]
        return sum(seconds for _, seconds in following) < HOST_CHAIN_S

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        if not (self.in_flight or self.has_work):
            self._gaps.pause()
        seq.arrived_s = self._clock()
        if self._awaited is not None:
            self._awaited.add(seq)
        self._queue(seq)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence; what a plan in flight reads of it is freed when that reports."""
        if seq.state is State.FINISHED:
            return
        self._recent.finished(seq)
        self._end(seq)

    def forget(self) -> None:
        """Counters, and the lengths and iterations seen; what stages cost, it keeps."""
        self.metrics = Metrics()
        self._recent = Recent()
        self._kept.clear()

    def schedule(self) -> Step | None:
        """The next iteration; None: none before a plan in flight has reported.

        Raises ``PlanError`` where the policy is wrong.
        """
        self.admitted.clear()
        self.cost.refresh()
        view, slots = self._view()
        plan = self._checked_plan(view)
        if self.in_flight and self._must_wait(plan):
            return None
        if plan.num_rows == 0 and plan.preempt:  # whoever was preempted can start again at once
            self._preempt(plan.preempt)
            view, slots = self._view()
            plan = self._checked_plan(view)
        if plan.num_rows == 0 and not (plan.swap_in or plan.swap_out):
            raise PlanError(f"policy {self.policy.name} lets nothing advance: {view}")
        step = self._carry_out(plan, view, slots)
        self.in_flight += 1
        load = load_of_step(step)
        self._expected[step.plan_id] = load, load.seconds(self.cost)
        return step

    def update(self, step: Step, result: StepResult) -> list[tuple[Sequence, int]]:
        """Takes the result in; returns the sequences that got a token, with it."""
        if result.plan_id != step.plan_id or len(result.statuses) != len(step.seqs):
            raise PlanError(f"result of plan {result.plan_id} does not answer {step.plan_id}")
        self._gaps.reported(self._clock(), result.elapsed_s)
        self.in_flight -= 1
        self.metrics.device_s += result.elapsed_s
        self.cost.learn(*self._expected.pop(step.plan_id), result)
        self.blocks.reported(step.plan_id)
        sampled: list[tuple[Sequence, int]] = []
        rows = zip(
            *(step.seqs, step.kind.tolist(), step.epoch.tolist(), step.sample.tolist()),
            *(step.start.tolist(), result.statuses, result.tokens),
            strict=True,
        )
        for seq, kind, epoch, sample, start, status, token in rows:
            if status == _VOIDED:
                self.metrics.num_voided_rows += 1
                if seq.epoch == epoch:
                    self._roll_back(seq, start)
                continue
            self._count_decode(seq, kind, sample)
            if seq.epoch != epoch:
                self.metrics.num_wasted_rows += 1
            elif sample:
                seq.tokens.append(token)
                seq.pending -= 1
                sampled.append((seq, token))
        self.metrics.num_output_tokens += len(sampled)
        if result.logprobs:
            _hand_logprobs(step, result)
        return sampled

    def reset(self, blocks: BlockManager) -> None:
        """The gpu worker was lost with both caches' contents: everything is computed again."""
        self._start_over(blocks)
        self.in_flight = 0
        self._expected.clear()
        self._gaps = Gaps()
        self.riders = Riders(self.riders.num_groups, self.riders.capacity)
        blocks.reported(self._plan_id)

    def _first_token_due(self) -> tuple[int, float] | None:
        if self._awaited is None:
            return None
        in_flight = sum(seconds for _, seconds in self._expected.values())
        return self._awaited.due(self._clock() + in_flight)

    def _must_wait(self, plan: Plan) -> bool:
        """A plan in flight may end what makes this plan move somebody, or what makes it empty."""
        if plan.preempt or (plan.swap_out and self.blocks.has_deferred):
            return True
        # The plan that moved a sequence still reads the table row that moving it back rewrites.
        moves = plan.swap_in + plan.swap_out
        if any(self.running[i].moved_plan > self.blocks.last_reported for i in moves):
            return True
        return plan.num_rows == 0 and not (plan.swap_in or plan.swap_out)

    def _view(self) -> tuple[View, Ints]:
        running, slots = self._columns.view()
        seats = min(self.config.max_num_seqs - len(self.running), self.blocks.slots.free)
        view = View(
            waiting=Waiting(self.waiting),
            running=running,
            gpu_blocks_free=self.blocks.blocks.free,
            gpu_blocks_total=self.blocks.blocks.total,
            cpu_pages_free=self.blocks.pages.free,
            cpu_pages_total=self.blocks.pages.total,
            block_size=self.blocks.block_size,
            page_size=self.blocks.page_size,
            seats_free=seats,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_swaps=self._max_swaps,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
            cpu_workers=self._cpu_workers(),
            plan_id=self._plan_id + 1,
            modes=self.modes,
            max_skipped=self.config.max_skipped_iterations,
            prefill_share=self._recent.prefill_share,
            prefill_tokens=self._recent.prefill_tokens,
            cpu_decodes=self._recent.cpu_decodes,
            mean_prompt=self._recent.mean_prompt,
            mean_output=self._recent.mean_output,
            tpot_slo_s=self.config.tpot_slo_s,
            ride_groups=self.riders.num_groups,
            ride_capacity=self.riders.capacity,
            first_token_due=self._first_token_due(),
            kept=self._kept,
        )
        return view, slots

    def _checked_plan(self, view: View) -> Plan:
        plan = self.policy.plan(view, self.cost)
        check_plan(plan, view)
        return plan

    def _carry_out(self, plan: Plan, view: View, slots: Ints) -> Step:
        self._plan_id += 1
        self._preempt(plan.preempt)
        swaps = self._swap(plan, self._plan_id)
        batches = [batch.in_wire_order() for batch in plan.batches]
        for seq_id in np.concatenate([b.seq for b in batches] or [np.empty(0, np.int64)]).tolist():
            if seq_id not in self.running:
                self._admit(seq_id, batches)
        step = self._step(plan, batches, swaps)
        self._note_skipped(plan, view, slots, step)
        self._count_iteration(plan, step)
        return step

    def _step(self, plan: Plan, batches: list[Rows], swaps: tuple[StepSwap, ...]) -> Step:
        rows = self.riders.rows(batches, plan.riders, self.running)
        seqs, kind, n_new = rows.seqs, rows.kind, rows.n_new
        slot = np.array([seq.slot for seq in seqs], np.int64)
        self._grow(seqs, slot, kind)
        start, ends = self._columns.progress(slot)
        rides = kind == RowKind.RIDE_CPU
        sample = np.where(rides, rows.stage == self.riders.last_stage, start + n_new == ends)
        stored = np.where(rides & ~sample, 0, n_new)  # a rider's token counts when it has passed
        for seq, tokens, last in zip(seqs, stored.tolist(), sample.tolist(), strict=True):
            seq.last_plan = self._plan_id
            seq.num_computed += tokens
            seq.pending += last
        self._columns.advance(slot, stored, slot[sample])
        if self.riders.any:
            self._columns.rode(slot, np.array([seq.ride for seq in seqs], np.int64))
        epoch = np.array([seq.epoch for seq in seqs], np.int64)
        return Step(
            *(self._plan_id, rows.sizes, seqs, slot, kind, start, n_new),
            *(sample.astype(np.int64), epoch, rows.stage, rows.place, swaps, plan),
        )

    def _count_iteration(self, plan: Plan, step: Step) -> None:
        kind = self._kind(plan)
        self.metrics.iterations[kind] += 1
        self.metrics.prefill_iterations[kind] += bool((step.kind < RowKind.DECODE_GPU).any())
        self._recent.planned(step)

    @staticmethod
    def _kind(plan: Plan) -> Mode:
        """CPU-bound prefills count as offloading too."""
        if plan.mode is Mode.GPU_ONLY and any((b.kind % 2 == 1).any() for b in plan.batches):
            return Mode.ONE_BATCH
        return plan.mode

    def _count_decode(self, seq: Sequence, kind: int, sample: int) -> None:
        if kind == _DECODE_GPU:
            self.metrics.num_gpu_decodes += 1
            seq.num_gpu_decodes += 1
        elif kind == _DECODE_CPU or (kind == _RIDE_CPU and sample):
            self.metrics.num_cpu_decodes += 1
            seq.num_cpu_decodes += 1


def _hand_logprobs(step: Step, result: StepResult) -> None:
    """To the sequences whose rows count."""
    epochs = step.epoch.tolist()
    for row, position, logprobs in result.logprobs:
        seq = step.seqs[row]
        if result.statuses[row] == RowStatus.VOIDED or seq.epoch != epochs[row]:
            continue
        if position < seq.num_prompt:
            seq.prompt_logprobs[position] = logprobs
        else:
            seq.logprobs = logprobs
