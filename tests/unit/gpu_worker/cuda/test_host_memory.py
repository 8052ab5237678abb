"""Pinning of shared segments, with a driver that only keeps account of it."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from gpu_worker.cuda import host_memory
from gpu_worker.cuda.host_memory import MappedSegment
from gpu_worker.errors import DeviceError

ALREADY_PINNED = 712  # cudaErrorHostMemoryAlreadyRegistered
PAGES = 3


class Pages:
    """As much of a segment as is asked for; ``mapped`` as long as it lives."""

    mapped = 0

    def __init__(self) -> None:
        self._memory = torch.zeros(PAGES * mmap.PAGESIZE - 8, dtype=torch.uint8)
        self.size, self.address = len(self._memory), self._memory.data_ptr()
        Pages.mapped += 1

    def __del__(self) -> None:
        Pages.mapped -= 1


class Driver:
    """Refuses what is pinned, as the driver does, and whatever would be one chunk too many."""

    def __init__(self, most: int = PAGES) -> None:
        self.pinned: dict[int, int] = {}
        self._most = most

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        taken = any(at < address + size and address < at + n for at, n in self.pinned.items())
        if taken or len(self.pinned) == self._most:
            return ALREADY_PINNED
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert Pages.mapped == 1  # else another mapping could have these addresses by now
        del self.pinned[address]
        return 0


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", mmap.PAGESIZE)
    return driver


def test_a_segment_is_pinned_whole_and_as_long_as_it_is_used(pin: Driver) -> None:
    pages = Pages()
    mapped = MappedSegment(pages)  # type: ignore[arg-type]
    assert len(pin.pinned) == PAGES
    assert sum(pin.pinned.values()) == pages.size
    with pytest.raises(DeviceError, match=f"at 0 of {pages.size}: error 712"):
        MappedSegment(pages)  # type: ignore[arg-type]
    assert sum(pin.pinned.values()) == pages.size
    del mapped, pages
    gc.collect()
    assert pin.pinned == {}
    assert Pages.mapped == 0


def test_what_was_pinned_before_a_refusal_is_not_any_more(pin: Driver) -> None:
    pages = Pages()
    pin._most = PAGES - 1
    with pytest.raises(DeviceError, match=f"of {mmap.PAGESIZE - 8} bytes at {2 * mmap.PAGESIZE}"):
        MappedSegment(pages)  # type: ignore[arg-type]
    assert pin.pinned == {}


def test_closing_twice_is_closing_once(pin: Driver) -> None:
    pages = Pages()
    mapped = MappedSegment(pages)  # type: ignore[arg-type]
    mapped.close()
    mapped.close()
    assert pin.pinned == {}
    MappedSegment(pages).close()  # type: ignore[arg-type]
