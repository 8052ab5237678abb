"""Launches beside the current stream: in a captured graph, a branch of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A second stream that starts behind the first one's work so far, and is waited for later."""

    def __init__(self, device: torch.device) -> None:
        # Its few programs go before those of kernels that fill the device.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._forked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def launched(self) -> Iterator[None]:
        """What is launched meanwhile."""
        self._forked.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._forked)
            yield
            self._done.record()

    def join(self) -> None:
        """The current stream goes on only when all of it is through."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)
