"""Pinning of shared segments, with a driver that only keeps account of it."""

from __future__ import annotations

import gc
import logging
import mmap
import resource
from typing import Any

import pytest
import torch

from gpu_worker.cuda import host_memory
from gpu_worker.cuda.host_memory import MappedSegment
from gpu_worker.cuda.pinning import pin_or_do_without
from gpu_worker.errors import DeviceError, PinningError
from protos.config import EngineConfig, PlanMode, SchedulerConfig

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

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"text of {error}"

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
    with pytest.raises(PinningError, match=f"at 0 of {pages.size}: error 712, text of 712"):
        MappedSegment(pages)  # type: ignore[arg-type]
    assert sum(pin.pinned.values()) == pages.size
    del mapped, pages
    gc.collect()
    assert pin.pinned == {}
    assert Pages.mapped == 0


def test_what_was_pinned_before_a_refusal_is_not_any_more(pin: Driver) -> None:
    pages = Pages()
    pin._most = PAGES - 1
    with pytest.raises(PinningError, match=f"of {mmap.PAGESIZE - 8} bytes at {2 * mmap.PAGESIZE}"):
        MappedSegment(pages)  # type: ignore[arg-type]
    assert pin.pinned == {}


def test_closing_twice_is_closing_once(pin: Driver) -> None:
    pages = Pages()
    mapped = MappedSegment(pages)  # type: ignore[arg-type]
    mapped.close()
    mapped.close()
    assert pin.pinned == {}
    MappedSegment(pages).close()  # type: ignore[arg-type]


CPU = torch.device("cpu")


def config_of(*modes: PlanMode) -> EngineConfig:
    return EngineConfig(model_path="", scheduler=SchedulerConfig(plan_modes=modes))


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (mmap.PAGESIZE, [") is 0.003906 MiB", "--ulimit memlock=-1"]),
        (1 << 27, [") is 128 MiB", "--kv-offloading-size"]),
        (resource.RLIM_INFINITY, [") is unlimited", "--kv-offloading-size"]),
    ],
)
def test_all_segments_are_pinned_or_none_and_why_is_said_once(
    limit: int,
    words: list[str],
    pin: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    segments: Any = [Pages(), Pages()]
    config = config_of("gpu_only", "one_batch")
    monkeypatch.setattr(pin, "cudaHostUnregister", lambda address: pin.pinned.pop(address) and 0)
    pin._most = 2 * PAGES - 1
    with caplog.at_level(logging.WARNING):
        assert pin_or_do_without(segments, config, CPU) is None
    assert pin.pinned == {}
    (record,) = caplog.records
    said = record.getMessage()
    assert f"of {segments[0].size}: error" in said
    assert all(word in said for word in words)
    caplog.clear()
    pin._most = 2 * PAGES
    pinned = pin_or_do_without(segments, config, CPU)
    assert pinned is not None
    assert len(pin.pinned) == 2 * PAGES
    assert caplog.records == []
    for mapped in pinned:
        mapped.close()


def test_a_policy_with_cpu_requests_only_cannot_do_without(pin: Driver) -> None:
    pin._most = 0
    segments: Any = [Pages()]
    with pytest.raises(DeviceError, match="neo has CPU-requests only, but cudaHostRegister"):
        pin_or_do_without(segments, config_of("one_batch", "two_batches"), CPU)
