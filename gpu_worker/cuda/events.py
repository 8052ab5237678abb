"""CUDA events with types: PyTorch annotates none of these methods."""

from __future__ import annotations

import torch


class Event:
    """A timed event; methods as of ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Behind what the current stream holds now."""
        self._event.record()

    def query(self) -> bool:
        """The stream has come this far, or nothing was recorded."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits until ``query`` is true."""
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until ``end``; both must be through."""
        return float(self._event.elapsed_time(end._event))
