"""Runs plans on a CUDA device without waiting: submitted, then collected in their order.

The host enqueues swaps beside the iterations (``gpu_worker.cuda.copies``), uploads one block of
metadata per sub-batch and enqueues the iteration: a graph replay, or launches one by one where no
graph fits. Tokens of continuing rows stay on the device.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.cuda.buckets import Key, Shape
from gpu_worker.cuda.drawing import Drawing
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.graphs import Graphs
from gpu_worker.cuda.plan import HostPlan, MetaLayout
from gpu_worker.cuda.rides import VoidRiders
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.streams import Mark as Point
from gpu_worker.cuda.timeline import DeviceRecorder, Recorded
from gpu_worker.executor import Outcome
from gpu_worker.features import Features, Report
from gpu_worker.kv_pool import GpuCache
from gpu_worker.timing import StageTimes
from neo_native import RowStatus
from neo_native.timeline import Timeline

COUNTED_TOKENS = 64  # steps of the log's sizes
RIDES = -1  # among channels: all riders
WATCH_S = 50e-6  # between looks at a plan that waits for cpu workers


@dataclass
class InFlight:
    """A submitted plan."""

    plan: HostPlan
    begin: Event
    end: Event
    staged: list[Tensor]  # pinned metadata, until the upload is through; the last: of riders
    outcome: Tensor  # pinned copy of Buffers.outcome
    cpu_tasks: int
    announced: bool
    last_epochs: dict[int, int]
    last_ride: int  # the last job of riders that it takes back
    replayed: bool  # from a graph, not launched kernel by kernel
    reports: tuple[Report, ...]  # pinned, as is outcome
    copied: list[Point]  # behind its swaps
    seen: dict[int, int] = field(default_factory=dict)  # what was done, when last looked at
    since: float = 0.0  # when they last grew
    recorded: Recorded | None = None


class CudaExecutor:
    """The device's side of every iteration."""

    def __init__(
        self,
        stages: Stages,
        cache: GpuCache,
        layout: MetaLayout,
        graphs: Graphs | None,
        depth: int,
        keep_waiting: Callable[[], bool],
        features: Features,
    ) -> None:
        """``depth``: plans in flight at most. ``keep_waiting``: false gives up CPU rows at once."""
        self._stages = stages
        self._drawing = Drawing(stages.buffers, features)
        self._copies = stages.exchange.copies(cache.blocks, depth) if stages.exchange else None
        self._layout = layout
        self._graphs = graphs
        self._keep_waiting = keep_waiting
        self._in_flight: deque[InFlight] = deque()
        self._pinned = [self._new_pinned() for _ in range(depth)]
        # By slot: its latest row that samples, of the plans collected, gave a token.
        self._has_token = np.zeros(0, np.bool_)
        self._depth = depth
        rides = stages.buffers.rides
        self._void = VoidRiders(rides.layout) if rides else None
        # By whether a graph was replayed and by tokens: plans and their device seconds.
        self._spent: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
        self._waited = [0.0, 0.0]  # device seconds, for rows of kind decode_cpu and for riders
        self._recorder: DeviceRecorder | None = None

    def record(self, timeline: Timeline) -> None:
        """From now on the plans that it asks for are recorded."""
        self._recorder = DeviceRecorder(timeline, self._stages)

    def _new_pinned(self) -> tuple[list[Tensor], Tensor]:
        buffers = self._stages.buffers
        metas = [
            torch.empty(self._layout.size, dtype=torch.int32, pin_memory=True)
            for _ in buffers.channels
        ]
        if buffers.rides is not None:
            metas.append(torch.empty_like(buffers.rides.meta, device="cpu", pin_memory=True))
        outcome = torch.empty(buffers.outcome.shape, dtype=torch.int32, pin_memory=True)
        return metas, outcome

    @property
    def pending(self) -> int:
        """Plans submitted and not collected."""
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """No plan can be submitted before one is collected."""
        return self.pending == self._depth

    def ready(self) -> bool:
        """The oldest plan is through."""
        if not self._in_flight:
            return False
        self._watch(self._in_flight[0])
        oldest = self._in_flight[0]
        return oldest.end.query() and all(copied.query() for copied in oldest.copied)

    @torch.inference_mode()
    def submit(self, plan: HostPlan) -> None:
        """Enqueues the plan."""
        buffers, exchange = self._stages.buffers, self._stages.exchange
        metas, outcome = self._pinned.pop()
        has_cpu = any(batch.n_cpu_rows for batch in plan.batches) or plan.rides is not None
        tasks, epochs, last_ride = 0, {}, 0
        key = self._key_of(plan)
        recorder = self._recorder_of(plan, key)
        if has_cpu:
            assert exchange is not None
            tasks, epochs = exchange.announce(plan), exchange.last_epochs(plan)
            last_ride = exchange.last_ride(plan)
        if self._copies is not None:
            self._copies.start(plan, *((recorder.marked_copy,) if recorder else ()))
        begin, end = Event(), Event()
        begin.record()
        for batch in plan.batches:
            metas[batch.channel].numpy()[: batch.used] = batch.meta[: batch.used]
            to = buffers.channels[batch.channel].meta
            to[: batch.used].copy_(metas[batch.channel][: batch.used], non_blocking=True)
        if plan.rides is not None:
            assert buffers.rides is not None
            metas[-1].numpy()[:] = plan.rides.meta
            buffers.rides.meta.copy_(metas[-1], non_blocking=True)
        self._drawing.record(plan)
        replayed, reports = self._enqueue(plan, key, recorder)
        reports += self._drawing.draw(plan)
        outcome.copy_(buffers.outcome, non_blocking=True)
        fetched = tuple(report.fetched() for report in reports)
        end.record()
        copied = self._copies.finish(plan) if self._copies is not None else []
        self._in_flight.append(
            InFlight(
                *(plan, begin, end, metas, outcome, tasks, has_cpu, epochs, last_ride),
                *(replayed, fetched, copied),
            )
        )
        if recorder is not None:
            self._in_flight[-1].recorded = recorder.take()

    def _key_of(self, plan: HostPlan) -> Key | None:
        """Of the graph that serves it; None: its launches are made one by one."""
        # Prompts' log-probabilities need every token's last residual row: no graph keeps them.
        if self._graphs is None or (plan.wanted is not None and len(plan.wanted.prompts) > 0):
            return None
        return self._graphs.key_of(plan)

    def _recorder_of(self, plan: HostPlan, key: Key | None) -> DeviceRecorder | None:
        """Where the plan is to be recorded; what it takes is made before the plan begins."""
        recorder = self._recorder
        if recorder is None or not recorder.begin_plan(plan.plan_id, self._depth):
            return None
        if key is not None:
            if not recorder.has(key):  # capturing waits for the device, and watches over nothing
                for flight in self._in_flight:
                    self._await(flight)
            recorder.prepare(key)
        return recorder

    def _enqueue(
        self, plan: HostPlan, key: Key | None, recorder: DeviceRecorder | None
    ) -> tuple[bool, list[Report]]:
        """The iteration. Whether it is a graph's, and the log-probabilities of prompts."""
        chunked = any(batch.cpu_chunks for batch in plan.batches)  # earlier chunks are read at once
        if self._copies is not None and (key is not None or chunked):
            self._copies.hold()
        if self._graphs is not None and key is not None:
            (recorder or self._graphs).replay(key)
            return True, []
        reports: list[Report] = []
        stages = recorder.stages if recorder else self._stages
        stages.forward(
            [Shape.of(batch) for batch in plan.batches],
            lambda shape: reports.extend(self._drawing.prompt_reports(plan, shape)),
            self._copies.hold_layer if self._copies is not None else None,
        )
        return False, reports

    def collect(self) -> Outcome:
        """Waits for the oldest plan."""
        flight = self._in_flight.popleft()
        self._await(flight)
        outcome = self._outcome(flight)
        tokens = sum(batch.n_tokens for batch in flight.plan.batches)
        kind = "replayed" if flight.replayed else "launched"
        spent = self._spent[kind, -(-tokens // COUNTED_TOKENS) * COUNTED_TOKENS]
        spent[0] += 1
        spent[1] += outcome.times.elapsed
        self._waited[0] += sum(outcome.times.cpu_wait)
        self._waited[1] += outcome.times.ride_wait
        if flight.announced and self._stages.exchange is not None:
            self._stages.exchange.retire(flight.plan)
        self._pinned.append((flight.staged, flight.outcome))
        if flight.recorded is not None and self._recorder is not None:
            plan_id, tasks = flight.plan.plan_id, flight.cpu_tasks
            self._recorder.write(plan_id, flight.recorded, flight.begin, flight.end, tasks)
        return outcome

    def logits(self, channel: int, rows: int) -> Tensor:
        """[rows, vocab] of a sub-batch's sampled rows, of the plan collected last; to measure."""
        return self._stages.buffers.logits[channel, :rows]

    def summary(self) -> str:
        """How plans ran so far, for the log: by kind and size those that took the longest."""
        most = sorted(self._spent.items(), key=lambda item: -item[1][1])[:12]
        plans = "; ".join(
            f"{count:.0f} {kind} of up to {tokens} tokens, {seconds / count * 1e3:.2f} ms each"
            for (kind, tokens), (count, seconds) in most
        )
        rows, riders = self._waited
        return f"{plans}; waits for CPU rows {rows:.1f} s, for riders {riders:.1f} s"

    def _await(self, flight: InFlight) -> None:
        if not flight.last_epochs and not flight.last_ride:
            flight.end.synchronize()
        while not flight.end.query():
            self._watch(flight)
            time.sleep(WATCH_S)
        for copied in flight.copied:
            copied.synchronize()

    def _watch(self, flight: InFlight) -> None:
        """Gives up the CPU rows of the oldest plan once no job of it was done for too long."""
        exchange = self._stages.exchange
        if not (flight.last_epochs or flight.last_ride) or exchange is None:
            return
        done = {channel: exchange.done_epoch(channel) for channel in flight.last_epochs}
        done[RIDES] = exchange.ride_progress()
        now = time.monotonic()
        if done != flight.seen or not flight.begin.query():
            flight.seen, flight.since = done, now
        elif now - flight.since > exchange.timeout_s or not self._keep_waiting():
            exchange.give_up(flight.last_epochs)
            exchange.give_up_rides(flight.last_ride)

    def _outcome(self, flight: InFlight) -> Outcome:
        plan, n_rows = flight.plan, len(flight.plan.slots)
        host, width = flight.outcome.numpy(), self._stages.buffers.rows
        status = np.full(n_rows, RowStatus.COMPUTED, np.uint32)
        tokens, logprobs = np.full(n_rows, -1, np.int32), np.zeros(n_rows, np.float32)
        times = StageTimes(elapsed=flight.begin.elapsed_time(flight.end) * 1e-3)
        outcome = Outcome(
            *(plan.plan_id, plan.slots, status, tokens, logprobs, times, flight.cpu_tasks),
            reports=flight.reports,
        )
        at = 0
        for batch in plan.batches:
            rows = plan.sampled_rows[at : at + batch.n_sampled]
            at += batch.n_sampled
            mine = host[batch.channel]
            status[rows] = RowStatus.SAMPLED
            tokens[rows] = mine[: batch.n_sampled]
            logprobs[rows] = mine[width : width + batch.n_sampled].view(np.float32)
            times.cpu_wait[batch.channel] = float(mine[2 * width + 2 :].view(np.int64)[0]) * 1e-9
            if mine[2 * width]:
                outcome.void(np.arange(batch.rows.stop - batch.n_cpu_rows, batch.rows.stop))
        self._know(plan.slots)
        lost = plan.continued & ~self._has_token[plan.slots]
        outcome.void(np.flatnonzero(lost))
        if plan.rides is not None and self._void is not None:
            mine = host[len(self._stages.buffers.outcome) - 1]
            times.ride_wait = float(mine[:2].view(np.int64)[0]) * 1e-9
            outcome.void(self._void.rows(plan.rides, mine[2:], lost))
        self._has_token[plan.slots[plan.sampled_rows]] = False
        self._has_token[plan.slots[status == RowStatus.SAMPLED]] = True
        return outcome

    def _know(self, slots: npt.NDArray[np.uint32]) -> None:
        more = int(slots.max(initial=0)) + 1 - len(self._has_token)
        if more > 0:
            self._has_token = np.pad(self._has_token, (0, more))
