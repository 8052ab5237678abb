"""Spans of the host thread's stages, for ``--trace-timeline``.

Where no timeline is recorded nothing here is ever called; of a recorded run only the plans that the
server chose are.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.timing import StageTimer, StageTimes
from neo_native.timeline import HOST_LANE, Lane, SpanKind, Timeline

KINDS = {
    "linear": SpanKind.LINEAR,
    "gpu_attn": SpanKind.GPU_ATTN,
    "cpu_wait": SpanKind.CPU_WAIT,
    "ride_wait": SpanKind.CPU_WAIT,
    "handoff": SpanKind.HANDOFF,
    "swap": SpanKind.SWAP,
    "head": SpanKind.HEAD,
}


class Recorder:
    """Hands out timers that also record."""

    def __init__(self, timeline: Timeline, tasks: Callable[[], int]) -> None:
        """``tasks``: attention tasks of the plan that is over, for its iteration's span."""
        self._timeline = timeline
        self._tasks = tasks
        self._lane = timeline.lane(HOST_LANE)

    def timer(self, plan_id: int) -> StageTimer | None:
        """For a plan that begins now, or None where it is not recorded."""
        if not self._timeline.begin_plan(plan_id):
            return None
        return RecordingTimer(self._lane, plan_id, self._tasks)


class RecordingTimer(StageTimer):
    """A ``StageTimer`` whose laps become spans; ``time.perf_counter`` is CLOCK_MONOTONIC."""

    def __init__(self, lane: Lane, plan_id: int, tasks: Callable[[], int]) -> None:
        super().__init__()
        self._lane = lane
        self._plan_id = plan_id
        self._tasks = tasks
        self._before = ("", 0)  # stage and channel of the lap before

    def lap(self, stage: str, channel: int | None = None) -> None:
        """As ``StageTimer``. What follows a wait is the collecting of what was waited for."""
        begin = self._last
        super().lap(stage, channel)
        kind = KINDS[stage]
        if stage == "handoff" and self._before[0] in ("cpu_wait", "ride_wait"):
            kind = SpanKind.COLLECT
        self._before = stage, self._before[1] if channel is None else channel
        self._lane.add(
            kind, _ns(begin), _ns(self._last), plan_id=self._plan_id, layer=self.layer,
            channel=self._before[1],
        )  # fmt: skip

    def stop(self) -> StageTimes:
        """As ``StageTimer``; adds the span of the whole iteration."""
        times = super().stop()
        end = self._begin + times.elapsed
        self._lane.add(
            SpanKind.ITERATION, _ns(self._begin), _ns(end),
            plan_id=self._plan_id, tasks=self._tasks(),
        )  # fmt: skip
        return times


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
