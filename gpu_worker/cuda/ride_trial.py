"""A wave that carries nothing, to measure what riders cost the rows that they ride beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.stages import Stages

if TYPE_CHECKING:
    from neo_native import Exchange

WATCH_S = 50e-6  # between looks at an iteration


class Wave:
    """As many riders in each group, each of a single token: the cpu workers have next to no work.

    In as many groups as a plan has rows for: capacities are rounded up, so all full are too many.
    Their K and V overwrite the first row of some pages of the CPU-cache.
    """

    def __init__(self, stages: Stages, native: Exchange, riders: int) -> None:
        """``riders``: 0 for empty groups."""
        rides, exchange = stages.buffers.rides, stages.exchange
        assert rides is not None
        assert exchange is not None
        self._rides, self._native = rides, native
        self._members = np.arange(riders, dtype=np.uint32)
        self._pages = np.arange(riders) % exchange.n_pages
        self._plans = 0
        self._last_job = 0
        layout = rides.layout
        self.groups = min(layout.stages, layout.max_rows // riders) if riders else 0  # that move

    @property
    def plans_to_fill(self) -> int:
        """After so many all groups move."""
        return self._rides.layout.stages

    def advance(self) -> None:
        """Announces a plan and uploads what its kernels need; one group more, then all."""
        layout = self._rides.layout
        meta = layout.blank.copy()
        groups = range(min(self._plans + 1, self.groups))
        stage_of = {group: (self._plans - group) % layout.stages for group in groups}
        by_stage = sorted((stage, group) for group, stage in stage_of.items())
        none, places = np.empty(0, np.uint32), self._members
        lens = np.ones(len(places), np.uint32)
        self._native.announce(
            0, (none, none), (none, none), [(g, s, places, places, lens) for s, g in by_stage]
        )
        fields, n = layout.views(meta), len(places)
        moves = self._native.announced_moves() if by_stage else []
        for (stage, group), move in zip(by_stage, moves, strict=True):
            collects, publishes, _, tasks = move
            fields["collects"][stage], fields["publishes"][stage] = collects, publishes
            fields["group"][stage], fields["count"][stage] = group, n
            fields["pages"][stage, :n] = self._pages
            fields["store_rows"][stage, :n] = group * layout.capacity + places
            fields["tasks"][stage, : tasks.size] = tasks.ravel()
        self._last_job = int(fields["publishes"].max())
        self._rides.meta.copy_(torch.from_numpy(meta))
        self._plans += 1

    def retire(self) -> None:
        """The plan is through."""
        self._native.retire(0)

    def give_up(self) -> None:
        """Ends the waits of the plan that was announced last."""
        self._native.ride_abort_through(self._last_job)


@dataclass(frozen=True)
class BesideRows:
    """Seconds of an iteration with riders, of the same without, and of the first the waits."""

    riding: float
    alone: float
    waited: float
    groups: int  # that moved


def timed(stages: Stages, native: Exchange, riders: int, shape: Shape) -> Callable[[], BesideRows]:
    """One iteration of each kind per call, from captured graphs; ``riders``: of each group.

    ``shape`` has places for riders. The metadata of its other rows is in place, behind these. The
    other iteration has as many rows, so that both multiply the same matrices. Raises
    ``TimeoutError`` where the cpu workers do not do their part.
    """
    rides, exchange = stages.buffers.rides, stages.exchange
    assert rides is not None
    assert exchange is not None
    rides.meta.copy_(torch.from_numpy(rides.layout.blank))
    with_riders = captured(lambda: stages.forward([shape]))
    without = captured(lambda: stages.forward([replace(shape, lead=0)]))
    wave = Wave(stages, native, riders)

    def ride() -> float:
        wave.advance()
        try:
            return replayed(with_riders, exchange.timeout_s, wave.give_up)
        finally:
            wave.retire()

    def run() -> BesideRows:
        riding = ride()
        waited = stages.buffers.rides_waited_ns.item() * 1e-9
        return BesideRows(riding, replayed(without), waited, wave.groups)

    for _ in range(wave.plans_to_fill):
        ride()
    return run


def captured(enqueue: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What the call launches."""
    enqueue()  # loads and compiles what capturing may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return graph


def replayed(
    graph: torch.cuda.CUDAGraph, patience_s: float = inf, give_up: Callable[[], None] | None = None
) -> float:
    """Seconds on the device. Raises ``TimeoutError`` where it took ``give_up`` to end it."""
    begin, end = Event(), Event()
    begin.record()
    graph.replay()
    end.record()
    stop = time.perf_counter() + patience_s
    while not end.query():
        if give_up is not None and time.perf_counter() > stop:
            give_up()
            end.synchronize()
            raise TimeoutError(f"attention on the CPU was not done in {patience_s:g} s")
        time.sleep(WATCH_S)
    return begin.elapsed_time(end) * 1e-3
