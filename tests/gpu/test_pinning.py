"""A refusal by the driver is no more than that."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.cuda.host_memory import MappedSegment
from gpu_worker.cuda.pinning import pin_all
from gpu_worker.errors import PinningError

DEVICE = torch.device("cuda", 0)


def test_pytorch_goes_on_after_a_segment_could_not_be_pinned() -> None:
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    segment: Any = SimpleNamespace(size=4 * mmap.PAGESIZE, address=address)
    mapped = MappedSegment(segment)
    with pytest.raises(PinningError, match="error 712"):  # is pinned already
        pin_all([segment], DEVICE)
    assert int(torch.arange(10, device=DEVICE).sum()) == 45
    mapped.close()
    (again,) = pin_all([segment], DEVICE)
    again.close()
