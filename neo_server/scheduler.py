"""Owns the queues: asks the policy for a plan, checks it, carries it out on the block manager."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from neo_server.block_manager import BlockManager
from neo_server.errors import PlanError
from neo_server.metrics import Metrics
from neo_server.plan import Place, Plan, PlanRow, RowKind, RowStatus, SwapKind, View, check_plan
from neo_server.policies import Policy
from neo_server.request import Sequence, State
from protos.config import SchedulerConfig

_BY_ARRIVAL = attrgetter("id")


class StepRow(NamedTuple):
    """A plan's row with all that the gpu worker needs, as it was when it was planned."""

    seq: Sequence
    slot: int
    kind: RowKind
    start: int
    n_new: int
    sample: bool


class StepSwap(NamedTuple):
    """Moves the first ``n_tokens`` of a slot."""

    slot: int
    kind: SwapKind
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration as it is sent."""

    plan_id: int
    batches: tuple[tuple[StepRow, ...], ...]
    swaps: tuple[StepSwap, ...]

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """Rows of all sub-batches in the order in which they are sent and answered."""
        return tuple(row for batch in self.batches for row in batch)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back; one entry per row, in the order of the step."""

    plan_id: int
    statuses: SequenceOf[int]  # RowStatus
    tokens: SequenceOf[int]  # -1 unless sampled
    elapsed_s: float


class Scheduler:
    """First come, first served queues under one policy. Lives on the event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        blocks: BlockManager,
        max_swaps: int,
        cpu_workers: Callable[[], int],
    ) -> None:
        self.config = config
        self.policy = policy
        self.blocks = blocks
        self.metrics = Metrics()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._max_swaps = max_swaps
        self._cpu_workers = cpu_workers
        self._plan_id = 0

    @property
    def has_work(self) -> bool:
        """Some sequence is not finished."""
        return bool(self.waiting or self.running)

    @property
    def max_tokens_per_sequence(self) -> int:
        """Prompt and output together: max_model_len, or what the larger usable cache holds."""
        # The last token of a sequence is never put into a cache.
        capacity = self.blocks.capacity(self.policy.places) + 1
        return min(self.config.max_model_len, capacity)

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        insort(self.waiting, seq, key=_BY_ARRIVAL)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence; what a plan in flight reads of it is freed when that reports."""
        if seq.state is State.FINISHED:
            return
        (self.waiting if seq.state is State.WAITING else self.running).remove(seq)
        self.blocks.drop(seq, State.FINISHED)

    def schedule(self) -> Step:
        """The next iteration. Raises ``PlanError`` where the policy is wrong."""
        view = self._view()
        plan = self._checked_plan(view)
        if plan.num_rows == 0 and plan.preempt:  # whoever was preempted can start again at once
            self._preempt(plan.preempt)
            view = self._view()
            plan = self._checked_plan(view)
        if plan.num_rows == 0 and not (plan.swap_in or plan.swap_out):
            raise PlanError(f"policy {self.policy.name} lets nothing advance: {view}")
        return self._carry_out(plan)

    def update(self, step: Step, result: StepResult) -> list[tuple[Sequence, int]]:
        """Takes the result in; returns the sequences that got a token, with it."""
        if result.plan_id != step.plan_id or len(result.statuses) != len(step.rows):
            raise PlanError(f"result of plan {result.plan_id} does not answer {step.plan_id}")
        self.blocks.reported(step.plan_id)
        sampled: list[tuple[Sequence, int]] = []
        for row, status, token in zip(step.rows, result.statuses, result.tokens, strict=True):
            if status == RowStatus.VOIDED:
                self.metrics.num_voided_rows += 1
                continue
            self._count_decode(row)
            if row.seq.state is not State.RUNNING:
                continue
            row.seq.num_computed += row.n_new
            if row.sample:
                row.seq.tokens.append(token)
                sampled.append((row.seq, token))
        self.metrics.num_output_tokens += len(sampled)
        return sampled

    def reset(self, blocks: BlockManager) -> None:
        """The gpu worker was lost with both caches' contents: everything is computed again."""
        for seq in self.running:
            self.blocks.drop(seq, State.WAITING)
            seq.last_plan = 0
            seq.num_preemptions += 1
            insort(self.waiting, seq, key=_BY_ARRIVAL)
        self.running.clear()
        self.blocks = blocks
        blocks.reported(self._plan_id)

    def _view(self) -> View:
        return View(
            waiting=tuple(seq.view() for seq in self.waiting),
            running=tuple(seq.view() for seq in self.running),
            gpu_blocks_free=self.blocks.blocks.free,
            gpu_blocks_total=self.blocks.blocks.total,
            cpu_pages_free=self.blocks.pages.free,
            cpu_pages_total=self.blocks.pages.total,
            block_size=self.blocks.block_size,
            page_size=self.blocks.page_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_swaps=self._max_swaps,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
            cpu_workers=self._cpu_workers(),
        )

    def _checked_plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        check_plan(plan, view)
        return plan

    def _carry_out(self, plan: Plan) -> Step:
        self._plan_id += 1
        self._preempt(plan.preempt)
        running = {seq.id: seq for seq in self.running}
        admitted = {seq.id: seq for seq in self.waiting if seq.state is State.WAITING}
        swaps = self._swap(plan, running)
        batches = []
        for batch in plan.batches:
            rows = [self._row(row, running, admitted) for row in batch]
            batches.append(tuple(sorted(rows, key=lambda row: (row.kind, row.seq.id))))
        self._count_iteration(plan, batches)
        return Step(self._plan_id, tuple(batches), swaps)

    def _preempt(self, ids: tuple[int, ...]) -> None:
        for seq in [seq for seq in self.running if seq.id in ids]:
            self.running.remove(seq)
            self.blocks.drop(seq, State.WAITING)
            seq.num_preemptions += 1
            self.metrics.num_preemptions += 1
            insort(self.waiting, seq, key=_BY_ARRIVAL)

    def _swap(self, plan: Plan, running: dict[int, Sequence]) -> tuple[StepSwap, ...]:
        swaps = []
        for kind, ids in ((SwapKind.OUT, plan.swap_out), (SwapKind.IN, plan.swap_in)):
            for seq_id in ids:
                seq = running[seq_id]
                if kind is SwapKind.OUT:
                    self.blocks.swap_out(seq)
                else:
                    self.blocks.swap_in(seq, self._plan_id)
                seq.last_plan = self._plan_id
                assert seq.slot is not None
                swaps.append(StepSwap(seq.slot, kind, seq.num_computed))
        self.metrics.num_swap_outs += len(plan.swap_out)
        self.metrics.num_swap_ins += len(plan.swap_in)
        return tuple(swaps)

    def _row(
        self, row: PlanRow, running: dict[int, Sequence], waiting: dict[int, Sequence]
    ) -> StepRow:
        seq = running.get(row.seq)
        if seq is None:
            seq = waiting[row.seq]
            self.waiting.remove(seq)
            self.blocks.open_slot(seq)
            seq.state, seq.place = State.RUNNING, row.kind.place
            insort(self.running, seq, key=_BY_ARRIVAL)
        self.blocks.grow(seq, row.kind.place)
        seq.last_plan = self._plan_id
        assert seq.slot is not None
        sample = seq.num_computed + row.n_new == len(seq.tokens)
        return StepRow(seq, seq.slot, row.kind, seq.num_computed, row.n_new, sample)

    def _count_iteration(self, plan: Plan, batches: list[tuple[StepRow, ...]]) -> None:
        offloads = any(row.kind.place is Place.CPU for batch in batches for row in batch)
        kind = "two_batches" if len(batches) == 2 else "one_batch" if offloads else "gpu_only"
        self.metrics.iterations[kind] += 1

    def _count_decode(self, row: StepRow) -> None:
        if row.kind is RowKind.DECODE_GPU:
            self.metrics.num_gpu_decodes += 1
            row.seq.num_gpu_decodes += 1
        elif row.kind is RowKind.DECODE_CPU:
            self.metrics.num_cpu_decodes += 1
            row.seq.num_cpu_decodes += 1
