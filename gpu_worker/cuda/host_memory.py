"""Shared segments as memory that kernels read and write directly."""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpu_worker.errors import PinningError

if TYPE_CHECKING:
    from neo_native import Segment

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30  # registered at a time, so that a refusal says how far it came


def _unpin(segment: Segment, chunks: list[int]) -> None:
    """``segment``: still mapped, so that no later mapping has these addresses."""
    del segment
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    while chunks:
        runtime.cudaHostUnregister(chunks.pop())


class MappedSegment:
    """A segment pinned for the device while this lives; views of it may be given to kernels."""

    def __init__(self, segment: Segment) -> None:
        """Raises ``PinningError`` where the driver refuses to pin it."""
        self._chunks: list[int] = []
        # Whoever maps other memory there later could not pin it, or would read the old pages.
        self._unpin = weakref.finalize(self, _unpin, segment, self._chunks)
        self._unpin.atexit = False  # then the driver does it
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for at in range(0, segment.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, segment.size - at)
            error = runtime.cudaHostRegister(segment.address + at, size, 0)
            if int(error) != 0:
                self.close()
                raise PinningError(
                    f"cudaHostRegister of {size} bytes at {at} of {segment.size}: "
                    f"error {int(error)}, {runtime.cudaGetErrorString(error)}"
                )
            self._chunks.append(segment.address + at)
        buffer = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        self._bytes = torch.from_numpy(np.ctypeslib.as_array(buffer))

    def view(self, offset: int, dtype: torch.dtype) -> Tensor:
        """Everything from ``offset`` on, as one-dimensional ``dtype``; offset in bytes."""
        rest = self._bytes[offset:]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unpins it."""
        self._unpin()
