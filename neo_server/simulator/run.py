"""One simulation: arrivals in, the scheduler's steps on a virtual clock, a report out."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from neo_native import RowKind, RowStatus, slot_params_dtype, token_bias_dtype
from neo_server.block_manager import BlockManager
from neo_server.correction import CorrectedCost
from neo_server.cost_model import CostModel, Load, iteration_time, layer_time
from neo_server.metrics import Metrics
from neo_server.plan import Mode
from neo_server.policies import load_policy
from neo_server.request import SamplingParams, Sequence
from neo_server.riders import group_capacity
from neo_server.scheduler import Scheduler
from neo_server.simulator.device import Device, Times
from neo_server.simulator.workload import Arrival
from neo_server.step import StageTimes, Step, StepResult
from neo_server.step_cost import StepLoad, load_of_step
from protos.config import SchedulerConfig

BLOCK_SIZE, PAGE_SIZE = 16, 64
PAPER_MODES = frozenset((Mode.GPU_ONLY, Mode.TWO_BATCHES))
ALL_MODES = frozenset(Mode)


class _Tables:
    """The sequence table in private memory; nobody reads it."""

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.params = np.zeros(slots, slot_params_dtype)
        self.block_table = np.zeros((slots, -(-max_model_len // BLOCK_SIZE)), np.uint32)
        self.page_table = np.zeros((slots, -(-max_model_len // PAGE_SIZE)), np.uint32)
        self.bias = np.zeros((slots, 0), token_bias_dtype)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated."""

    policy: str
    cost: CostModel  # the clock's
    gpu_tokens: int
    cpu_tokens: int
    config: SchedulerConfig
    modes: frozenset[Mode] = ALL_MODES
    believed: CostModel | None = None  # the scheduler's; None: the clock's


@dataclass(slots=True)
class Timeline:
    """One request's times."""

    arrival: Arrival
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.last_s - self.first_s) / max(self.arrival.num_output - 1, 1)

    @property
    def per_token_s(self) -> float:
        """End-to-end latency over output length, the paper's per-token latency."""
        return (self.last_s - self.arrival.at_s) / self.arrival.num_output


@dataclass(slots=True)
class Report:
    """What came of it."""

    requests: list[Timeline]
    seconds: float
    gpu_busy_s: float
    cpu_busy_s: float
    iterations: int
    steady_requests_per_s: float  # by work done while requests wait, from the first third on
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def requests_per_s(self) -> float:
        """From the first arrival to the last token."""
        return len(self.requests) / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens over the same time."""
        return sum(r.arrival.num_output for r in self.requests) / self.seconds

    @property
    def mean_per_token_s(self) -> float:
        """Mean over requests."""
        return float(np.mean([r.per_token_s for r in self.requests]))

    def percentile(self, name: str, share: float) -> float:
        """Of ``ttft_s``, ``tpot_s`` or ``per_token_s``."""
        return float(np.percentile([getattr(r, name) for r in self.requests], share))


class Simulation:
    """A scheduler whose gpu worker is a clock."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        tables = _Tables(config.max_num_seqs, config.max_model_len)
        blocks = BlockManager(
            tables,
            setting.gpu_tokens // BLOCK_SIZE,
            setting.cpu_tokens // PAGE_SIZE,
            BLOCK_SIZE,
            PAGE_SIZE,
        )
        self.setting = setting
        groups = setting.cost.num_layers + 1
        capacity = config.ride_capacity or group_capacity(groups, config.max_num_seqs)
        config = config.model_copy(update={"ride_capacity": capacity})
        self.scheduler = Scheduler(
            config,
            load_policy(setting.policy),
            blocks,
            max_swaps=config.max_num_seqs,
            cpu_workers=lambda: 1,
            cost=CorrectedCost(setting.believed or setting.cost),
            modes=setting.modes,
            clock=lambda: self.now,
            ride_groups=groups,
        )
        self.now = 0.0
        self.device = Device(setting.cost, tables.block_table, BLOCK_SIZE)
        self._alive: dict[int, Timeline] = {}
        self._in_flight: deque[tuple[Step, Times]] = deque()
        self._gpu_busy = self._cpu_busy = 0.0
        self._iterations = 0
        self._work = 0.0
        self._steady: list[tuple[float, float]] = []  # time and work so far, at either end

    def run(self, arrivals: SequenceOf[Arrival]) -> Report:
        """All of ``arrivals`` (by time) to their last token."""
        coming = deque(Timeline(arrival) for arrival in arrivals)
        requests = list(coming)
        self._weigh(arrivals)
        count = 0
        while coming or self.scheduler.has_work or self._in_flight:
            while coming and coming[0].arrival.at_s <= self.now:
                request = coming.popleft()
                self.admit(count, request.arrival, request)
                count += 1
            self._fill()
            self._watch(len(coming), len(requests))
            if self._in_flight:
                self._finish_step()
            else:
                self.now = coming[0].arrival.at_s
        return Report(
            *(requests, self.now - arrivals[0].at_s, self._gpu_busy, self._cpu_busy),
            *(self._iterations, self._steady_rate(requests), self.scheduler.metrics),
        )

    def _watch(self, coming: int, total: int) -> None:
        """The steady part: from when a third has been admitted until nobody waits."""
        left = coming + len(self.scheduler.waiting)
        if len(self._steady) < 2 and left <= (total * 2 // 3 if not self._steady else 0):
            self._steady.append((self.now, self._work))

    def _steady_rate(self, requests: list[Timeline]) -> float:
        """A prompt and an output token count as what they cost the GPU alone.

        So a backlog of half-done requests at the end of the window is no loss.
        """
        if len(self._steady) < 2 or self._steady[1][0] <= self._steady[0][0]:
            return len(requests) / (self.now - requests[0].arrival.at_s)
        (begin, before), (end, after) = self._steady
        prompt = sum(r.arrival.num_prompt for r in requests) * self._prompt_worth
        output = sum(r.arrival.num_output for r in requests) * self._output_worth
        return (after - before) / (end - begin) * len(requests) / (prompt + output)

    def _weigh(self, arrivals: SequenceOf[Arrival]) -> None:
        cost = self.setting.cost
        mean = float(np.mean([a.num_prompt + a.num_output / 2 for a in arrivals]))
        rows = max(min(self.setting.gpu_tokens / mean, self.setting.config.max_num_seqs), 1.0)
        decode = Load(tokens=rows, gpu_rows=rows, gpu_tokens=rows * mean, sampled=rows)
        self._output_worth = iteration_time(cost, [decode]) / rows
        self._prompt_worth = cost.num_layers * cost.linear(1 << 14) / (1 << 14)

    def admit(self, number: int, arrival: Arrival, request: Timeline | None = None) -> None:
        """Queues a request."""
        tokens = array("i", bytes(4 * arrival.num_prompt))
        seq = Sequence(number, tokens, arrival.num_prompt, SamplingParams(seed=0))
        seq.max_len = arrival.num_prompt + arrival.num_output
        self._alive[number] = request or Timeline(arrival)
        self.scheduler.add(seq)

    def _fill(self) -> None:
        while self.scheduler.wants_plan:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._in_flight.append((step, self.device.enqueue(step, self.now)))

    def _finish_step(self) -> None:
        step, times = self._in_flight.popleft()
        load = load_of_step(step)
        gpu, cpu = load.busy(self.setting.cost)
        self._gpu_busy += gpu
        self._cpu_busy += cpu
        self._iterations += 1
        self.now = max(self.now, times.reported)
        is_prefill = step.kind < RowKind.DECODE_GPU
        decodes = int(step.sample[~is_prefill].sum())
        prompt = int(step.n_new[is_prefill].sum())
        self._work += decodes * self._output_worth + prompt * self._prompt_worth
        sample = step.sample.tolist()
        statuses = [RowStatus.SAMPLED if s else RowStatus.COMPUTED for s in sample]
        tokens = [0 if s else -1 for s in sample]
        stages, elapsed = stage_times(self.setting.cost, load), times.end - times.begin
        result = StepResult(step.plan_id, statuses, tokens, elapsed, stages)
        for seq, _ in self.scheduler.update(step, result):
            request = self._alive[seq.id]
            if seq.num_output == 1:
                request.first_s = self.now
            if len(seq.tokens) == seq.max_len:
                request.last_s = self.now
                self.scheduler.finish(seq)
                del self._alive[seq.id]


def simulate(setting: Setting, arrivals: SequenceOf[Arrival]) -> Report:
    """Runs one setting."""
    return Simulation(setting).run(arrivals)


def stage_times(cost: CostModel, load: StepLoad) -> StageTimes:
    """What a worker would measure; the rest of the layers' time is what it waits for the CPU."""
    layers = cost.num_layers
    stages = load.stages(cost)
    head = cost.head(load.sampled)
    handoff = layers * sum(s.handoff for s in stages)
    linear = [layers * s.linear for s in stages] + [0.0]
    gpu_attn = [layers * s.gpu_attn for s in stages] + [0.0]
    whole = layers * layer_time(stages)
    wait = max(whole - sum(linear) - sum(gpu_attn) - handoff, 0.0)
    late = 0.0
    if load.ride.cpu_rows:
        late = max(cost.ride_attn(load.ride.cpu_rows, load.ride.cpu_tokens) - whole - head, 0.0)
    slowest = max(range(len(stages)), key=lambda channel: stages[channel].cpu_attn)
    waits = (wait, 0.0) if slowest == 0 else (0.0, wait)
    if not any(s.cpu_attn for s in stages):
        waits = (0.0, 0.0)
    return StageTimes(
        *((linear[0], linear[1]), (gpu_attn[0], gpu_attn[1]), waits, handoff),
        head=head,
        ride_wait=late,
    )
