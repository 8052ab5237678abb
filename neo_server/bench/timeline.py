"""A timeline of a few iterations as Chrome-trace JSON, which Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("complete" events
and metadata of processes and threads). All processes stamp one clock, CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from neo_native.segments import Location
from neo_native.timeline import (
    DEVICE_LANE,
    FIRST_CPU_LANE,
    RIDERS,
    RecordedLane,
    SpanKind,
    Timeline,
)
from neo_server.scheduler import Scheduler
from neo_server.step import Step

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Event = dict[str, Any]

# What the device does beside its rows' stages: tracks of their own, behind those of all lanes.
BESIDE_TID = 1 << 16
BESIDE = ("copies out", "copies in", "riders")

# What of a span's fields says something, by kind.
_STAGE = ("plan_id", "layer", "channel")
_ARGUMENTS = {
    SpanKind.ITERATION: ("plan_id", "tasks"),
    SpanKind.SWAP: ("plan_id", "layer"),
    SpanKind.HEAD: ("plan_id",),
    SpanKind.ATTEND: ("layer", "channel", "slot", "kv_head", "split", "tokens", "bytes"),
}


@dataclass
class Recording:
    """What a run writes down; made before the workers start."""

    timeline: Timeline
    after: int  # plans that come before the recorded ones
    iterations: int
    planned: list[tuple[str, int, int, int]] = field(default_factory=list)  # what, begin, end, plan
    _first: int | None = None

    @classmethod
    def start(cls, location: Location, after: int, iterations: int) -> Recording:
        """Creates the segment in which the workers write."""
        return cls(Timeline.create(location), after, iterations)

    def watch(self, scheduler: Scheduler) -> None:
        """From now on plans count; takes the scheduler's two calls an iteration."""
        scheduler.schedule = self._timed("plan", scheduler.schedule, self._note_step)  # type: ignore[method-assign]
        scheduler.update = self._timed("update", scheduler.update, None)  # type: ignore[method-assign]

    def _timed(
        self, what: str, call: Callable[P, R], note: Callable[[R], None] | None
    ) -> Callable[P, R]:
        @wraps(call)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.monotonic_ns()
            result = call(*args, **kwargs)
            step = result if isinstance(result, Step) else args[0] if args else None
            if isinstance(step, Step):
                self.planned.append((what, begin, time.monotonic_ns(), step.plan_id))
            if note is not None:
                note(result)
            return result

        return timed

    def _note_step(self, step: Step | None) -> None:
        """The first plan fixes which are recorded, before it is sent."""
        if step is not None and self._first is None:
            self._first = step.plan_id + self.after
            self.timeline.window(self._first, self._first + self.iterations)

    def write(self, path: Path) -> None:
        """The file, once the recorded plans are over."""
        lanes = self.timeline.recorded()
        if any(lane.lost for lane in lanes):
            _log.warning("the timeline is not whole: lanes were too short, record fewer iterations")
        first = self._first or 0
        window = range(first, first + self.iterations)
        planned = [entry for entry in self.planned if entry[3] in window]
        path.write_text(json.dumps(trace_of(lanes, planned), indent=None), encoding="utf-8")
        _log.info("timeline of plans %d to %d: %s", window.start, window.stop - 1, path)


def trace_of(
    lanes: Iterable[RecordedLane], planned: Iterable[tuple[str, int, int, int]]
) -> dict[str, Any]:
    """The whole file. ``planned``: what the scheduler did, begin and end in ns, plan."""
    events = [*_server_events(planned)]
    for lane in lanes:
        events += _lane_events(lane)
    origin = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - origin, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _server_events(planned: Iterable[tuple[str, int, int, int]]) -> Iterator[Event]:
    yield from _names(os.getpid(), 0, "neo_server", "scheduler", 0)
    for what, begin, end, plan in planned:
        yield _complete(what, "server", os.getpid(), 0, begin, end, {"plan_id": plan})


def _lane_events(lane: RecordedLane) -> Iterator[Event]:
    """A thread: its name, then its spans."""
    if lane.index >= FIRST_CPU_LANE:
        process, thread = f"cpu worker {lane.worker}", f"thread {lane.thread}"
    else:
        process, thread = "gpu_worker", "device" if lane.index == DEVICE_LANE else "host"
    yield from _names(lane.pid, lane.index, process, thread, 1 + lane.index)
    beside: set[int] = set()
    for span in lane.spans:
        kind, tid = SpanKind(int(span["kind"])), lane.index
        track = _beside(span) if lane.index == DEVICE_LANE else None
        if track is not None:
            tid = BESIDE_TID + track
            if track not in beside:
                beside.add(track)
                yield from _names(lane.pid, tid, process, BESIDE[track], 1 + lane.index)
        fields = _ARGUMENTS.get(kind, _STAGE)
        arguments = {name: int(span[name]) for name in fields}
        begin, end = int(span["begin_ns"]), int(span["end_ns"])
        category = "cpu" if kind is SpanKind.ATTEND else "gpu"
        yield _complete(kind.name.lower(), category, lane.pid, tid, begin, end, arguments)


def _beside(span: Any) -> int | None:
    """The track of a span that lies beside the device's stages."""
    channel = int(span["channel"])
    if span["kind"] == SpanKind.SWAP:
        return channel
    return RIDERS if channel == RIDERS else None


def _complete(
    name: str, category: str, pid: int, tid: int, begin: int, end: int, arguments: dict[str, int]
) -> Event:
    """A span; ``begin`` and ``end`` in ns, the file's times in us."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid,
        "ts": begin * 1e-3, "dur": round((end - begin) * 1e-3, 3), "args": arguments,
    }  # fmt: skip


def _names(pid: int, tid: int, process: str, thread: str, order: int) -> Iterator[Event]:
    for name, arguments in (
        ("process_name", {"name": process}),
        ("process_sort_index", {"sort_index": order}),
        ("thread_name", {"name": thread}),
    ):
        yield {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments}
