"""CUDA events with types (PyTorch annotates none of these methods), and timing by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from statistics import median

import torch

IN_GRAPH = 8  # calls per replay, so that the cost of a replay is spread


class Event:
    """A timed event, or one that is only waited for; methods as of ``torch.cuda.Event``."""

    def __init__(self, timing: bool = True, external: bool = False) -> None:
        """``external``: recorded by every replay of a graph that it is captured into."""
        self._event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, external=external
        )

    def record(self) -> None:
        """Behind what the current stream holds now."""
        self._event.record()

    def query(self) -> bool:
        """The stream has come this far, or nothing was recorded."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits until ``query`` is true."""
        self._event.synchronize()

    def hold_stream(self) -> None:
        """What the current stream gets from now on is done behind the event."""
        self._event.wait()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until ``end``; both must be through."""
        return float(self._event.elapsed_time(end._event))


def graph_seconds(call: Callable[[], object], repeats: int, stop: float = inf) -> float:
    """Median seconds of a call in a captured graph; no repeats after ``stop`` (perf_counter)."""
    call()  # loads and compiles what capturing may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    graph.replay()
    torch.cuda.synchronize()
    spent: list[float] = []
    while len(spent) < repeats and (not spent or time.perf_counter() < stop):
        begin, end = Event(), Event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e-3)
    return median(spent) / IN_GRAPH
