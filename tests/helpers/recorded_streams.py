"""Streams that do nothing but know which work is done before which."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.cuda.streams import Lane

Clock = dict[Lane, int]  # how many operations of each lane are known to be over


def later(a: Clock, b: Clock) -> Clock:
    """Both are over."""
    return {lane: max(a.get(lane, 0), b.get(lane, 0)) for lane in Lane}


@dataclass(frozen=True)
class Operation:
    """Something that a lane does."""

    name: str
    lane: Lane
    number: int  # on its lane, from 1 on
    after: Clock  # everything before it

    def waits_for(self, other: Operation) -> bool:
        """``other`` is over before this begins."""
        return self.after.get(other.lane, 0) >= other.number


class RecordedMark:
    """A point on a lane."""

    def __init__(self, streams: RecordedStreams, clock: Clock) -> None:
        self._streams = streams
        self.clock = clock

    def query(self) -> bool:
        """By chance, unless the host knows; what the host has seen is over for all that follows."""
        known = all(self._streams.host.get(lane, 0) >= n for lane, n in self.clock.items())
        if known or self._streams.draw.random() < self._streams.done_rate:
            self.synchronize()
            return True
        return False

    def synchronize(self) -> None:
        self._streams.host = later(self._streams.host, self.clock)


@dataclass
class RecordedStreams:
    """Checks that every two operations that meet in one place are done as they were enqueued."""

    draw: random.Random
    done_rate: float = 0.3
    host: Clock = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    _clocks: dict[Lane, Clock] = field(default_factory=dict)
    _current: Lane = Lane.COMPUTE
    _wrote: dict[Hashable, Operation] = field(default_factory=dict)
    _read: dict[Hashable, list[Operation]] = field(default_factory=dict)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, self._current = self._current, lane
        yield
        self._current = before

    def mark(self, lane: Lane) -> RecordedMark:
        return RecordedMark(self, dict(self._clocks.get(lane, {})))

    def wait(self, lane: Lane, mark: Any) -> None:
        self._clocks[lane] = later(self._clocks.get(lane, {}), mark.clock)

    def operate(
        self, name: str, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()
    ) -> Operation:
        """One operation on the current lane. Raises ``AssertionError`` for what may overtake it."""
        lane = self._current
        after = later(self._clocks.get(lane, {}), self.host)
        made = Operation(name, lane, after[lane] + 1, after)
        self._clocks[lane] = after | {lane: made.number}
        reads, writes = set(reads), set(writes)
        for place in reads | writes:
            self._check(made, self._wrote.get(place), place)
        for place in writes:
            for reader in self._read.pop(place, []):
                self._check(made, reader, place)
            self._wrote[place] = made
        for place in reads - writes:
            self._read.setdefault(place, []).append(made)
        self.operations.append(made)
        return made

    @staticmethod
    def _check(made: Operation, before: Operation | None, place: Hashable) -> None:
        assert before is None or made.waits_for(before), f"{made} may overtake {before} in {place}"
