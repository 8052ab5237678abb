"""Where a plan's time goes, by the stages of ``ResultHeader``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class StageTimes:
    """Seconds, summed over layers; pairs are per sub-batch."""

    elapsed: float = 0.0
    linear: list[float] = field(default_factory=lambda: [0.0, 0.0])
    gpu_attn: list[float] = field(default_factory=lambda: [0.0, 0.0])
    cpu_wait: list[float] = field(default_factory=lambda: [0.0, 0.0])
    handoff: float = 0.0
    swap: float = 0.0
    head: float = 0.0
    ride_wait: float = 0.0  # for the attention of riders


class StageTimer:
    """Gives the time since the last lap to one stage. Does nothing but ``elapsed`` when muted.

    Muted on CUDA, where the host's clock says when work was enqueued and not when it ran.
    """

    layer = 0  # of the laps that follow

    def __init__(self, muted: bool = False) -> None:
        self.times = StageTimes()
        self._muted = muted
        self._begin = self._last = time.perf_counter()

    def lap(self, stage: str, channel: int | None = None) -> None:
        """Ends a lap. ``channel`` for the stages that are kept per sub-batch."""
        if self._muted:
            return
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        if channel is None:
            setattr(self.times, stage, getattr(self.times, stage) + spent)
        else:
            getattr(self.times, stage)[channel] += spent

    def stop(self) -> StageTimes:
        """The sums, with ``elapsed``."""
        self.times.elapsed = time.perf_counter() - self._begin
        return self.times
