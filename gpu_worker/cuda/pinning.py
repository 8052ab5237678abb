"""What kernels reach of the host: pinned before anything is sized, or offloading is off."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gpu_worker.cuda.host_memory import MappedSegment
from gpu_worker.errors import DeviceError, PinningError

if TYPE_CHECKING:
    from neo_native import Segment
    from protos.config import EngineConfig

logger = logging.getLogger(__name__)


def pin_or_do_without(
    segments: Sequence[Segment], config: EngineConfig, device: torch.device
) -> list[MappedSegment] | None:
    """All of them pinned; None after a warning, where the plans of the policy can do without.

    Raises ``DeviceError`` where they cannot.
    """
    try:
        return pin_all(segments, device)
    except PinningError as error:
        reason = f"{error}. {_sizes(segments)}"
    if "gpu_only" not in config.scheduler.plan_modes:
        policy = config.scheduler.scheduling_policy
        raise DeviceError(f"{policy} has CPU-requests only, but {reason}")
    logger.warning("offloading is off, all requests stay on the GPU: %s", reason)
    return None


def pin_all(segments: Sequence[Segment], device: torch.device) -> list[MappedSegment]:
    """All of them, or none and ``PinningError``."""
    pinned: list[MappedSegment] = []
    try:
        for segment in segments:
            pinned.append(MappedSegment(segment))
    except PinningError:
        for mapped in pinned:
            mapped.close()
        # The runtime keeps the error for whoever asks next: PyTorch, after its next launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise
    return pinned


def _sizes(segments: Sequence[Segment]) -> str:
    """How much there is to pin, what limits it, what can be done."""
    total = sum(segment.size for segment in segments)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    remedy = "Free memory of the host or choose a smaller --kv-offloading-size"
    if limit != resource.RLIM_INFINITY and limit < total:
        remedy = "Raise the limit (ulimit -l unlimited; docker run --ulimit memlock=-1)"
    unlimited = limit == resource.RLIM_INFINITY
    locked = "unlimited" if unlimited else f"{limit / 2**20:.4g} MiB"
    return (
        f"{total / 2**30:.3g} GiB are to be pinned, locked memory (ulimit -l) is {locked}. {remedy}"
    )
