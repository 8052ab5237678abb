"""Which of the two ways to run plans is chosen, and what is said where it cannot be."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Literal

import pytest
import torch

from gpu_worker.backends import TRITON_CAPABILITY, uses_triton
from gpu_worker.errors import DeviceError
from protos.config import WorkerConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KernelBackend = Literal["auto", "torch", "triton"]


def worker(kernel_backend: KernelBackend) -> WorkerConfig:
    return WorkerConfig(kernel_backend=kernel_backend)


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA device that Triton supports, and a Triton that can be imported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: TRITON_CAPABILITY)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    return monkeypatch


def test_triton_on_a_cpu_is_refused_and_the_reason_named() -> None:
    with pytest.raises(DeviceError, match="kernel_backend is 'triton', but the device is cpu"):
        uses_triton(worker("triton"), CPU)


@pytest.mark.parametrize("kernel_backend", ["auto", "torch"])
def test_a_cpu_runs_plain_pytorch_without_a_warning(
    kernel_backend: KernelBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not uses_triton(worker(kernel_backend), CPU)
    assert caplog.records == []


def test_a_device_that_can_runs_triton_unless_pytorch_is_asked_for(
    device_of: pytest.MonkeyPatch,
) -> None:
    assert uses_triton(worker("auto"), CUDA)
    assert uses_triton(worker("triton"), CUDA)
    assert not uses_triton(worker("torch"), CUDA)


@pytest.mark.parametrize("missing", ["capability", "package"])
def test_what_a_device_lacks_is_warned_of_or_refused(
    missing: str, device_of: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "capability":
        device_of.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        reason = "compute capability 7.5, not 8.0"
    else:
        device_of.setitem(sys.modules, "triton", None)
        reason = "Triton cannot be imported"
    with caplog.at_level(logging.WARNING):
        assert not uses_triton(worker("auto"), CUDA)
    assert reason in caplog.text
    with pytest.raises(DeviceError, match=reason):
        uses_triton(worker("triton"), CUDA)
    caplog.clear()
    assert not uses_triton(worker("torch"), CUDA)
    assert caplog.records == []
