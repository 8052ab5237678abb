"""The two ways to run plans behind one interface: plain PyTorch, or Triton kernels on CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt
import torch

from gpu_worker.batch import PlanReader
from gpu_worker.errors import DeviceError
from gpu_worker.executor import Executor, Outcome
from gpu_worker.features import Features
from gpu_worker.kv_pool import GpuCache, num_gpu_blocks
from gpu_worker.model import LlamaModel
from gpu_worker.offload import Offload
from gpu_worker.plan_check import PlanLimits
from gpu_worker.profiler import Profiler
from neo_native import Control, CpuCache, Exchange, Sequences
from neo_native.segments import SegmentSet
from neo_native.timeline import Timeline
from protos.config import PLAN_MODES, EngineConfig, PlanMode, WorkerConfig

if TYPE_CHECKING:
    from neo_native import StepSlot

Array = npt.NDArray[Any]
logger = logging.getLogger(__name__)

TRITON_CAPABILITY = (8, 0)  # what today's Triton needs


class PlanRunner(Protocol):
    """Takes plans in order and gives what they gave, in order."""

    @property
    def pending(self) -> int:
        """Plans submitted and not collected."""

    @property
    def full(self) -> bool:
        """No plan can be submitted before one is collected."""

    def ready(self) -> bool:
        """The oldest plan is through."""

    def submit(self, plan: Any) -> None:
        """A plan of this backend's reader."""

    def collect(self) -> Outcome:
        """Waits for the oldest plan."""

    def summary(self) -> str:
        """How plans ran so far, for the log."""

    def record(self, timeline: Timeline) -> None:
        """From now on the plans that it asks for are recorded."""


class Reader(Protocol):
    """Copies plans out of the step ring."""

    def read(self, step: StepSlot) -> Any:
        """Raises ``BadPlanError``."""


@dataclass(frozen=True)
class Backend:
    """What a gpu worker runs plans with."""

    reader: Reader
    runner: PlanRunner
    profiler: Profiler
    num_gpu_blocks: int
    modes: tuple[PlanMode, ...]  # kinds of plan that it runs


def uses_triton(worker: WorkerConfig, device: torch.device) -> bool:
    """Whether ``kernel_backend`` chooses Triton here. Raises ``DeviceError`` if it cannot."""
    if worker.kernel_backend == "torch" or (
        device.type != "cuda" and worker.kernel_backend == "auto"
    ):
        return False
    reason = _why_no_triton(device)
    if reason and worker.kernel_backend == "triton":
        raise DeviceError(f"kernel_backend is 'triton', but {reason}")
    if reason:
        logger.warning("plain PyTorch instead of Triton kernels: %s", reason)
    return not reason


def _why_no_triton(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < TRITON_CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, not 8.0"
    try:
        import triton  # noqa: F401  (an optional dependency)
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return ""


@dataclass(frozen=True)
class Parts:
    """What both backends are made of."""

    config: EngineConfig
    model: LlamaModel
    segments: SegmentSet
    control: Control
    keep_waiting: Callable[[], bool]

    @property
    def longest(self) -> int:
        """Tokens that a slot of the CPU-cache has room for."""
        geometry = self.segments.geometry
        return int(geometry["max_pages"]) * int(geometry["page_size"])

    @property
    def max_rows(self) -> int:
        """Rows that a plan may have."""
        geometry = self.segments.geometry
        limits = (int(geometry["max_slots"]), int(geometry["max_rows"]))
        return min(self.config.scheduler.max_num_seqs, *limits)

    def sequences(self) -> Sequences:
        """Block and page tables."""
        return Sequences(self.segments.sequences, self.segments.geometry)

    def features(self) -> Features:
        """For biases, penalties and log-probabilities."""
        return Features(
            self.model.device,
            int(self.segments.geometry["max_slots"]),
            self.config.scheduler.max_model_len,
            self.model.config.vocab_size,
            self.model.logits,
        )

    def limits(self, num_blocks: int) -> PlanLimits:
        """What a plan may name."""
        return PlanLimits.from_geometry(
            self.segments.geometry,
            num_blocks,
            self.config.scheduler.max_model_len,
            self.model.config.vocab_size,
        )

    def exchange(self) -> Exchange:
        """The gpu worker's side; one per process."""
        s = self.segments
        return Exchange(self.control, s.work, s.exchange, s.geometry)

    def offload(self, exchange: Exchange, sequences: Sequences, threads: int) -> Offload:
        """The way to the CPU-cache through the host."""
        s = self.segments
        return Offload(
            exchange,
            CpuCache(s.cpu_cache, sequences, s.geometry, threads),
            s.geometry,
            self.model.dtype,
            self.model.device,
            self.config.worker.cpu_attn_timeout_s,
            keep_waiting=self.keep_waiting,
        )


def modes_run(riders: bool, offloads: bool = True) -> tuple[PlanMode, ...]:
    """Kinds of plan of a backend. ``riders``: the geometry has groups for them."""
    if not offloads:
        return ("gpu_only",)
    return tuple(mode for mode in PLAN_MODES if riders or mode != "piggyback")


def span_threads(worker: WorkerConfig) -> int:
    """How many threads copy a long span to or from the CPU-cache: of cores that are not leased."""
    return worker.torch_threads or max(1, worker.reserved_cores)


def make_backend(parts: Parts) -> Backend:
    """The one that configuration and device call for. Raises ``GpuWorkerError``."""
    if uses_triton(parts.config.worker, parts.model.device):
        from gpu_worker.cuda.backend import make_cuda_backend

        return make_cuda_backend(parts)
    return make_torch_backend(parts)


def make_torch_backend(parts: Parts) -> Backend:
    """Plain PyTorch, on any device; the host takes part in every layer."""
    config, model = parts.config, parts.model
    blocks = num_gpu_blocks(
        model.config, config.cache, config.scheduler, model.dtype.itemsize, model.device
    )
    cache = GpuCache(model.config, blocks, config.cache.block_size, model.dtype, model.device)
    sequences = parts.sequences()
    offload = parts.offload(parts.exchange(), sequences, span_threads(config.worker))
    profiler = Profiler(
        model,
        cache,
        offload,
        config.scheduler.max_num_batched_tokens,
        parts.max_rows,
        parts.longest,
    )
    reader = PlanReader(sequences, parts.limits(blocks), model.device)
    groups, capacity = (int(parts.segments.geometry[f"ride_{n}"]) for n in ("groups", "capacity"))
    executor = Executor(model, cache, offload, parts.features(), groups, capacity)
    return Backend(reader, executor, profiler, blocks, modes_run(riders=groups > 0))
