"""Spans of the device's stages, for ``--trace-timeline``.

A recorded plan is launched kernel by kernel, each stage between two CUDA events, by stages of
another class on the same buffers: graphs and the stages that serve hold nothing of it. Launches
from the host leave gaps that a graph has not, so the spans show what runs beside what and how long
each stage takes, not the iteration's length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.streams import Lane
from neo_native.timeline import DEVICE_LANE, SpanKind, Timeline


@dataclass(frozen=True)
class Mark:
    """A stage between two events."""

    kind: SpanKind
    layer: int
    channel: int
    begin: Event
    end: Event


class MarkedStages(Stages):
    """As the stages that it is made from, with marks around each."""

    def __init__(self, stages: Stages) -> None:
        self.__dict__.update(stages.__dict__)
        self.beside = None  # riders in line with the rows: spans of a lane do not overlap
        self._marks: list[Mark] = []

    def take(self) -> list[Mark]:
        """The marks since the last call."""
        taken, self._marks = self._marks, []
        return taken

    @contextmanager
    def marked(self, kind: SpanKind, layer: int = 0, channel: int = 0) -> Iterator[None]:
        """What the current stream gets meanwhile."""
        begin, end = Event(), Event()
        begin.record()
        yield
        end.record()
        self._marks.append(Mark(kind, layer, channel, begin, end))

    def _embed(self, s: Shape) -> None:
        with self.marked(SpanKind.HEAD, channel=s.channel):
            super()._embed(s)

    def linear(self, s: Shape, layer: int) -> None:
        """See ``Stages``."""
        with self.marked(SpanKind.LINEAR, layer, s.channel):
            super().linear(s, layer)

    def _post_projection(self, s: Shape, layer: int) -> None:
        if layer + 1 < self._config.num_hidden_layers:  # part of a linear stage
            super()._post_projection(s, layer)
            return
        with self.marked(SpanKind.LINEAR, layer + 1, s.channel):
            super()._post_projection(s, layer)

    def store(self, s: Shape, layer: int) -> None:
        """See ``Stages``."""
        with self.marked(SpanKind.HANDOFF, layer, s.channel):
            super().store(s, layer)

    def join(self, s: Shape, layer: int) -> None:
        """See ``Stages``: the wait and the collecting of what was waited for."""
        if not s.cpu_rows or layer == 0:
            return
        with self.marked(SpanKind.CPU_WAIT, layer, s.channel):
            super().join(s, layer)

    def pass_riders(self, s: Shape, layer: int) -> None:
        """See ``Stages``: with the wait for the cpu workers in it."""
        with self.marked(SpanKind.HANDOFF, layer, s.channel):
            super().pass_riders(s, layer)

    def attend(self, s: Shape, layer: int) -> None:
        """See ``Stages``."""
        with self.marked(SpanKind.GPU_ATTN, layer, s.channel):
            super().attend(s, layer)

    def head(self, s: Shape) -> None:
        """See ``Stages``."""
        with self.marked(SpanKind.HEAD, self._config.num_hidden_layers, s.channel):
            super().head(s)


class DeviceRecorder:
    """Which plans are recorded, and their marks on the host's clock."""

    def __init__(self, timeline: Timeline, stages: Stages) -> None:
        self._timeline = timeline
        self._lane = timeline.lane(DEVICE_LANE)
        self.stages = MarkedStages(stages)
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
        return self.stages.marked(SpanKind.SWAP, layer, int(lane is Lane.IN))

    def write(
        self, plan_id: int, marks: Sequence[Mark], begin: Event, end: Event, tasks: int
    ) -> None:
        """Once the plan is over."""
        for mark in marks:
            self._lane.add(
                mark.kind, self._ns(mark.begin), self._ns(mark.end),
                plan_id=plan_id, layer=mark.layer, channel=mark.channel,
            )  # fmt: skip
        self._lane.add(
            SpanKind.ITERATION, self._ns(begin), self._ns(end), plan_id=plan_id, tasks=tasks
        )

    def _ns(self, event: Event) -> int:
        assert self._origin is not None
        origin, at = self._origin
        return at + round(origin.elapsed_time(event) * 1e6)
