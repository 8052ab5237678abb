"""Spans of the device's stages, for ``--trace-timeline``.

A recorded plan runs as others do, by stages of another class on the same buffers that lay each
stage between two CUDA events: in a graph of its own where a graph would serve it, so that no launch
of the host's lies between the stages, else launched one by one. What serves holds nothing of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_worker.cuda.buckets import Key, Shape
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.streams import Lane
from neo_native.timeline import DEVICE_LANE, RIDERS, SpanKind, Timeline


@dataclass(frozen=True)
class Mark:
    """A stage between two events."""

    kind: SpanKind
    layer: int
    channel: int
    begin: Event
    end: Event


class Marks:
    """What lies between events, in the order in which it ended."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def take(self) -> list[Mark]:
        """The marks since the last call."""
        taken, self._marks = self._marks, []
        return taken

    @contextmanager
    def around(self, kind: SpanKind, layer: int = 0, channel: int = 0) -> Iterator[None]:
        """What the current stream gets meanwhile."""
        begin, end = Event(external=True), Event(external=True)
        begin.record()
        yield
        end.record()
        self._marks.append(Mark(kind, layer, channel, begin, end))


class MarkedStages(Stages):
    """As the stages that it is made from, with marks around each."""

    def __init__(self, stages: Stages) -> None:
        self.__dict__.update(stages.__dict__)
        self.marks = Marks()

    def _embed(self, s: Shape) -> None:
        with self.marks.around(SpanKind.HEAD, channel=s.channel):
            super()._embed(s)

    def linear(self, s: Shape, layer: int) -> None:
        """See ``Stages``."""
        with self.marks.around(SpanKind.LINEAR, layer, s.channel):
            super().linear(s, layer)

    def _post_projection(self, s: Shape, layer: int) -> None:
        if layer + 1 < self._config.num_hidden_layers:  # part of a linear stage
            super()._post_projection(s, layer)
            return
        with self.marks.around(SpanKind.LINEAR, layer + 1, s.channel):
            super()._post_projection(s, layer)

    def store(self, s: Shape, layer: int) -> None:
        """See ``Stages``."""
        with self.marks.around(SpanKind.HANDOFF, layer, s.channel):
            super().store(s, layer)

    def join(self, s: Shape, layer: int) -> None:
        """See ``Stages``: the wait and the collecting of what was waited for."""
        if not s.cpu_rows or layer == 0:
            return
        with self.marks.around(SpanKind.CPU_WAIT, layer, s.channel):
            super().join(s, layer)

    def pass_riders(self, s: Shape, layer: int) -> None:
        """See ``Stages``: with the wait for the cpu workers in it; beside the rows' stages."""
        with self.marks.around(SpanKind.HANDOFF, layer, RIDERS):
            super().pass_riders(s, layer)

    def attend(self, s: Shape, layer: int) -> None:
        """See ``Stages``."""
        with self.marks.around(SpanKind.GPU_ATTN, layer, s.channel):
            super().attend(s, layer)

    def head(self, s: Shape) -> None:
        """See ``Stages``."""
        with self.marks.around(SpanKind.HEAD, self._config.num_hidden_layers, s.channel):
            super().head(s)


@dataclass(frozen=True)
class MarkedGraph:
    """The marks hold the times of its last replay."""

    key: Key
    replay: Callable[[], None]
    marks: list[Mark]


class MarkedGraphs:
    """Captured when a plan asks for them, which waits for the device; each runs one plan at once.

    So the first plans of a shape, as many as are in flight, begin on an idle device.
    """

    def __init__(self, stages: MarkedStages) -> None:
        self._stages = stages
        self._free: defaultdict[Key, list[MarkedGraph]] = defaultdict(list)
        self._pool: Any = None  # all graphs': no two run at once

    def has(self, key: Key) -> bool:
        """One is captured whose last plan is over."""
        return bool(self._free[key])

    def take(self, key: Key) -> MarkedGraph:
        """One whose last plan is over."""
        return self._free[key].pop() if self._free[key] else self._captured(key)

    def give_back(self, graph: MarkedGraph) -> None:
        """Once its marks are read."""
        self._free[graph.key].append(graph)

    def _captured(self, key: Key) -> MarkedGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._stages.forward(key)
        return MarkedGraph(key, graph.replay, self._stages.marks.take())


@dataclass
class Recorded:
    """What a plan that was enqueued leaves to be read."""

    marks: list[Mark] = field(default_factory=list)
    graph: MarkedGraph | None = None


class DeviceRecorder:
    """Which plans are recorded, and their marks on the host's clock."""

    def __init__(self, timeline: Timeline, stages: Stages) -> None:
        self._timeline = timeline
        self._lane = timeline.lane(DEVICE_LANE)
        self.stages = MarkedStages(stages)
        self._graphs = MarkedGraphs(self.stages)
        self._graph: MarkedGraph | None = None  # of the plan that is being enqueued
        self._copies = Marks()
        self._origin: tuple[Event, int] | None = None  # an event, and when it was, in ns

    def begin_plan(self, plan_id: int, in_flight: int) -> bool:
        """Whether this plan is recorded. The first that is waits for the device once."""
        recorded = self._timeline.begin_plan(plan_id, in_flight)
        if recorded and self._origin is None:
            torch.cuda.synchronize()
            origin = Event()
            origin.record()
            origin.synchronize()
            self._origin = origin, time.monotonic_ns()
        return recorded

    def marked_copy(self, lane: Lane, layer: int) -> AbstractContextManager[None]:
        """A part of a plan's swaps, whose lane is current; the channel says which lane it is."""
        return self._copies.around(SpanKind.SWAP, layer, int(lane is Lane.IN))

    def has(self, key: Key) -> bool:
        """To ``prepare`` this key captures nothing."""
        return self._graphs.has(key)

    def prepare(self, key: Key) -> None:
        """Before the plan begins, so that a capture is no part of it."""
        self._graph = self._graphs.take(key)

    def replay(self, key: Key) -> None:
        """The iteration, as the graph of that key, which is prepared, runs it."""
        assert self._graph is not None
        assert self._graph.key == key
        self._graph.replay()

    def take(self) -> Recorded:
        """Of the plan that was enqueued last."""
        marks = self._copies.take() + self.stages.marks.take()
        recorded, self._graph = Recorded(marks, self._graph), None
        return recorded

    def write(self, plan_id: int, recorded: Recorded, begin: Event, end: Event, tasks: int) -> None:
        """Once the plan is over."""
        graph = recorded.graph
        for mark in (*recorded.marks, *(graph.marks if graph else ())):
            self._lane.add(
                mark.kind, self._ns(mark.begin), self._ns(mark.end),
                plan_id=plan_id, layer=mark.layer, channel=mark.channel,
            )  # fmt: skip
        self._lane.add(
            SpanKind.ITERATION, self._ns(begin), self._ns(end), plan_id=plan_id, tasks=tasks
        )
        if graph is not None:
            self._graphs.give_back(graph)

    def _ns(self, event: Event) -> int:
        assert self._origin is not None
        origin, at = self._origin
        return at + round(origin.elapsed_time(event) * 1e6)
