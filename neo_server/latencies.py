"""What the engine measures of every request and iteration: histograms of plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from neo_server.request import Request
from neo_server.step import StageTimes

# Upper bounds in seconds; those of requests are vLLM's, so that its dashboards fit.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STAGE = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
STAGES = ("linear", "gpu_attn", "handoff", "swap", "head")
FINISHED_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts by upper bound, inclusive; the last count is of what exceeds every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds ``value``, ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class Latencies:
    """Histograms in seconds, and counts of requests, since the server became ready."""

    def __init__(self) -> None:
        self.queue = Histogram(_REQUEST)  # from submission to the first plan
        self.first_token = Histogram(_FIRST_TOKEN)  # from submission
        self.inter_token = Histogram(_INTER_TOKEN)
        self.e2e = Histogram(_REQUEST)  # from submission to the end; not of aborted requests
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.num_prompt_tokens = 0  # of requests that have a token
        self.stages = {name: Histogram(_STAGE) for name in STAGES}  # of an iteration
        self.handoff_wait = Histogram(_STAGE)  # of an iteration, of the device for cpu workers

    def note_planned(self, requests: Iterable[Request], now: float) -> None:
        """These are in a plan; counted the first time only."""
        for request in requests:
            if request.planned_at is None:
                request.planned_at = now
                self.queue.observe(now - request.arrived_at)

    def note_tokens(self, requests: Sequence[Request], now: float) -> None:
        """Each got a token. Most of an iteration's have waited equally long."""
        for gap_start, count in Counter([request.token_at for request in requests]).items():
            if gap_start is not None:
                self.inter_token.observe(now - gap_start, count)
        for request in requests:
            if request.token_at is None:
                self.first_token.observe(now - request.arrived_at)
                self.num_prompt_tokens += request.sequence.num_prompt
            request.token_at = now

    def note_end(self, request: Request, now: float) -> None:
        """It leaves the engine; without a ``finish`` it has failed."""
        reason = "error" if request.finish is None else request.finish.reason.name.lower()
        self.finished[reason] += 1
        if reason in ("stop", "length"):
            self.e2e.observe(now - request.arrived_at)

    def note_stages(self, times: StageTimes) -> None:
        """Of one iteration; what was not measured is 0 and not counted."""
        for name, seconds in (
            ("linear", sum(times.linear)),
            ("gpu_attn", sum(times.gpu_attn)),
            ("handoff", times.handoff),
            ("swap", times.swap),
            ("head", times.head),
        ):
            if seconds > 0.0:
                self.stages[name].observe(seconds)
        wait = sum(times.cpu_wait) + times.ride_wait
        if wait > 0.0:
            self.handoff_wait.observe(wait)
