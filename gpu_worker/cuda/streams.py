"""Lanes of work on a device, and what waits for what.

Everything that orders streams goes through these calls, so that without a device the same calls
are made and tests can look at them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Protocol

import torch

from gpu_worker.cuda.events import Event


class Lane(IntEnum):
    """Work of one lane is done in the order in which it was enqueued."""

    COMPUTE = 0  # the stream that is current when an iteration is enqueued
    OUT = 1  # copies to the CPU-cache
    IN = 2  # copies from it


class Mark(Protocol):
    """A point on a lane."""

    def query(self) -> bool:
        """The lane has come this far."""

    def synchronize(self) -> None:
        """The host waits until ``query`` is true."""


class Streams(Protocol):
    """The lanes of one device."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """What is launched meanwhile goes to the lane."""

    def mark(self, lane: Lane) -> Mark:
        """Behind all that the lane holds now."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """What the lane gets from now on is done behind the mark."""


class CudaStreams:
    """A stream for each direction of copies; neither waits for the default stream by itself."""

    def __init__(self, device: torch.device) -> None:
        self._copies: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for lane in (Lane.OUT, Lane.IN)
        }

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """See ``Streams``."""
        if lane is Lane.COMPUTE:
            return nullcontext()
        return torch.cuda.stream(self._copies[lane])

    def mark(self, lane: Lane) -> Event:
        """See ``Streams``."""
        event = Event(timing=False)
        with self.on(lane):
            event.record()
        return event

    def wait(self, lane: Lane, mark: Mark) -> None:
        """See ``Streams``; ``mark``: of these streams."""
        assert isinstance(mark, Event)
        with self.on(lane):
            mark.hold_stream()


class Passed:
    """A mark on a device that does everything at once."""

    def query(self) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Returns."""


class OneStream:
    """Everything in the order in which it is enqueued."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """The current stream, whatever the lane."""
        return nullcontext()

    def mark(self, lane: Lane) -> Mark:
        """See ``Streams``."""
        if not self._is_cuda:
            return Passed()
        event = Event(timing=False)
        event.record()
        return event

    def wait(self, lane: Lane, mark: Mark) -> None:
        """What is enqueued later is done later."""


def streams_of(device: torch.device) -> Streams:
    """Streams where the device has them."""
    return CudaStreams(device) if device.type == "cuda" else OneStream(device)
