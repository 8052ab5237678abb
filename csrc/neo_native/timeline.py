"""The timeline segment (protos/timeline.hpp): created by the server, written by the workers.

There is one only while a timeline is asked for, so that a worker which finds none records nothing.
Memory is taken as spans are written: a file of tmpfs has holes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

import numpy as np

from neo_native._core import (
    Array,
    SpanKind,
    device_lane,
    first_cpu_lane,
    lane_header_dtype,
    span_dtype,
    timeline_header_dtype,
    timeline_magic,
)
from neo_native.location import Location, SegmentsError

__all__ = [
    "DEVICE_LANE",
    "FIRST_CPU_LANE",
    "HOST_LANE",
    "RIDERS",
    "Lane",
    "RecordedLane",
    "SpanKind",
    "Timeline",
]

KIND = "timeline"
HOST_LANE, DEVICE_LANE, FIRST_CPU_LANE = 0, device_lane, first_cpu_lane
RIDERS = 2  # channel of the device's spans for riders, behind those of the sub-batches
LANES = 256
SPANS = 1 << 16  # of a lane; 4 MiB


@dataclass(frozen=True)
class RecordedLane:
    """What one thread did, oldest first."""

    index: int
    pid: int
    worker: int
    thread: int
    spans: Array  # of span_dtype
    lost: int  # older spans that newer ones took the place of


class Lane:
    """One thread's spans; only that thread writes."""

    def __init__(self, header: Array, spans: Array) -> None:
        self._header = header
        self._spans = spans

    def add(self, kind: SpanKind, begin_ns: int, end_ns: int, **fields: int) -> None:
        """``fields``: the others of ``Span``."""
        count = int(self._header["count"])
        span = np.zeros((), span_dtype)
        span["kind"], span["begin_ns"], span["end_ns"] = kind, begin_ns, end_ns
        for name, value in fields.items():
            span[name] = value
        self._spans[count % len(self._spans)] = span
        self._header["count"] = count + 1


class Timeline:
    """The mapped segment."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Raises ``SegmentsError`` for memory that is no timeline."""
        self.memory = memory
        self._header = np.frombuffer(memory, timeline_header_dtype, 1)
        if int(self._header["magic"][0]) != timeline_magic:
            raise SegmentsError("the timeline segment is another version's")
        lanes, spans = int(self._header["n_lanes"][0]), int(self._header["n_spans"][0])
        at = timeline_header_dtype.itemsize
        self._lanes = np.frombuffer(memory, lane_header_dtype, lanes, at)
        at += lanes * lane_header_dtype.itemsize
        self._spans = np.frombuffer(memory, span_dtype, lanes * spans, at).reshape(lanes, spans)

    @staticmethod
    def create(location: Location, lanes: int = LANES, spans: int = SPANS) -> Timeline:
        """An empty one; before the workers attach. Unlinked with the other segments."""
        size = timeline_header_dtype.itemsize
        size += lanes * (lane_header_dtype.itemsize + spans * span_dtype.itemsize)
        fd = location.open(KIND, create=True)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        header = np.zeros(1, timeline_header_dtype)
        header["n_lanes"], header["n_spans"], header["next_lane"] = lanes, spans, FIRST_CPU_LANE
        header["magic"] = timeline_magic
        memory[: timeline_header_dtype.itemsize] = header.tobytes()
        return Timeline(memory)

    @staticmethod
    def attach(location: Location) -> Timeline | None:
        """That of a running instance, or None where none is recorded."""
        with contextlib.suppress(FileNotFoundError):
            fd = location.open(KIND)
            try:
                return Timeline(mmap.mmap(fd, os.fstat(fd).st_size))
            finally:
                os.close(fd)
        return None

    def window(self, first_plan: int, last_plan: int) -> None:
        """Plans [first_plan, last_plan) are recorded."""
        self._header["last_plan"] = last_plan
        self._header["first_plan"] = first_plan

    def begin_plan(self, plan_id: int, in_flight: int = 0) -> bool:
        """The gpu worker's, before it submits a plan: whether the plan is recorded.

        Cpu workers record as long. ``in_flight``: earlier plans that may not be over yet.
        """
        first, last = int(self._header["first_plan"][0]), int(self._header["last_plan"][0])
        self._header["on"] = first <= plan_id < last + in_flight
        return first <= plan_id < last

    def lane(self, index: int) -> Lane:
        """A lane whose owner is fixed."""
        self._lanes[index]["pid"] = os.getpid()
        return Lane(self._lanes[index], self._spans[index])

    def recorded(self) -> list[RecordedLane]:
        """Every lane that has an owner."""
        found = []
        for index in np.flatnonzero(self._lanes["pid"]):
            header, room = self._lanes[index], self._spans.shape[1]
            count = int(header["count"])
            order = np.arange(max(0, count - room), count) % room
            found.append(
                RecordedLane(
                    index=int(index),
                    pid=int(header["pid"]),
                    worker=int(header["worker"]),
                    thread=int(header["thread"]),
                    spans=self._spans[index][order].copy(),
                    lost=max(0, count - room),
                )
            )
        return found
