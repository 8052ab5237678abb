"""What the scheduler remembers of the latest iterations and requests, for policies to see."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from neo_native import RowKind
from neo_server.request import Sequence, State
from neo_server.step import Step

_WEIGHT = 1 / 32  # of the newest iteration, or sequence
_PREFILL_WEIGHT = 4 * _WEIGHT  # of the newest iteration with a prefill: there are fewer
_GAP = 0.02  # of an iteration


@dataclass(slots=True)
class Recent:
    """Running means."""

    prefill_share: float = 0.0  # of iterations, how many held a prefill
    prefill_tokens: float = 0.0  # of such an iteration
    cpu_decodes: float = 0.0  # of an iteration
    mean_prompt: float = 0.0  # tokens, of the sequences that finished; 0: none did
    mean_output: float = 0.0

    def finished(self, seq: Sequence) -> None:
        """Takes the lengths of a sequence that ends, if it got any token."""
        if seq.num_output:
            weight = _WEIGHT if self.mean_prompt else 1.0
            self.mean_prompt += weight * (seq.num_prompt - self.mean_prompt)
            self.mean_output += weight * (seq.num_output - self.mean_output)

    def planned(self, step: Step) -> None:
        """Takes an iteration."""
        prefill = int(step.n_new[step.kind < RowKind.DECODE_GPU].sum())
        self.prefill_share += _WEIGHT * ((prefill > 0) - self.prefill_share)
        decoded = (step.kind == RowKind.DECODE_CPU) | (step.kind == RowKind.RIDE_CPU)
        cpu_decodes = int(step.sample[decoded].sum())
        self.cpu_decodes += _WEIGHT * (cpu_decodes - self.cpu_decodes)
        if prefill:
            self.prefill_tokens += _PREFILL_WEIGHT * (prefill - self.prefill_tokens)


class Awaited:
    """Requests by arrival, until their first token is there or too late."""

    def __init__(self, target_s: float) -> None:
        """``target_s``: from arrival to the first token."""
        self._target_s = target_s
        self._seqs: deque[Sequence] = deque()

    def add(self, seq: Sequence) -> None:
        """A new request."""
        self._seqs.append(seq)

    def due(self, begin_s: float) -> tuple[int, float] | None:
        """The earliest one's id, and the seconds left to a plan that begins at ``begin_s``."""
        late = begin_s - self._target_s
        while self._seqs:
            seq = self._seqs[0]
            if seq.state is not State.FINISHED and not seq.num_output and seq.arrived_s > late:
                return seq.id, seq.arrived_s - late
            self._seqs.popleft()
        return None


class Gaps:
    """Whether the device stands still between plans, since the host is late with the next.

    Means of signed differences: a report that comes late makes the next gap less.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None  # of the latest report; None: there was a pause
        self._gap_s = 0.0
        self._elapsed_s = 0.0

    def reported(self, now_s: float, elapsed_s: float) -> None:
        """A plan that took ``elapsed_s`` on the device."""
        if self._last_s is not None:
            gap = now_s - self._last_s - elapsed_s
            self._gap_s += _WEIGHT * (min(max(gap, -elapsed_s), elapsed_s) - self._gap_s)
            self._elapsed_s += _WEIGHT * (elapsed_s - self._elapsed_s)
        self._last_s = now_s

    def pause(self) -> None:
        """There was nothing to do until now."""
        self._last_s = None

    @property
    def often(self) -> bool:
        """Lately, and for more than reporting takes."""
        return self._gap_s > _GAP * self._elapsed_s
