"""Plain counters behind GetLoads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

ITERATION_KINDS = ("gpu_only", "one_batch", "two_batches", "piggyback")
_WINDOW_S = 10.0


@dataclass(slots=True)
class Metrics:
    """Totals since the server became ready."""

    iterations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ITERATION_KINDS, 0))
    prefill_iterations: dict[str, int] = field(  # those of ``iterations`` with prompt tokens
        default_factory=lambda: dict.fromkeys(ITERATION_KINDS, 0)
    )
    device_s: float = 0.0  # sum of what the gpu worker reports as ``elapsed`` of its plans
    num_gpu_decodes: int = 0
    num_cpu_decodes: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_swap_out_tokens: int = 0  # whose K and V the swaps moved
    num_swap_in_tokens: int = 0
    num_output_tokens: int = 0
    num_voided_rows: int = 0
    num_wasted_rows: int = 0  # of sequences that had finished or were preempted meanwhile
    max_skipped: int = 0  # iterations in a row that a CPU decode was left out
    num_gpu_worker_restarts: int = 0


class Throughput:
    """Output tokens per second over the last ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, tokens: int) -> None:
        """Counts tokens of one iteration."""
        self._events.append((self._clock(), tokens))
        self._sum += tokens
        self._forget()

    def rate(self) -> float:
        """Tokens per second; before ten seconds have passed, over what has passed."""
        self._forget()
        return self._sum / max(min(self._clock() - self._start, _WINDOW_S), 1e-9)

    def _forget(self) -> None:
        oldest = self._clock() - _WINDOW_S
        while self._events and self._events[0][0] < oldest:
            self._sum -= self._events.popleft()[1]
