"""The gpu worker's heartbeat: plan in, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gpu_worker import ops
from gpu_worker.abandonment import is_abandoned
from gpu_worker.backends import Parts, make_backend
from gpu_worker.errors import DeviceError
from gpu_worker.executor import Outcome
from gpu_worker.features import Report
from gpu_worker.geometry_check import check_geometry
from gpu_worker.model import LlamaModel
from gpu_worker.profile_store import load_or_profile, profile_key
from gpu_worker.profiler import WORKERS_WAIT_S
from gpu_worker.weights import TORCH_DTYPES, LlamaWeights, dummy_weights, load_weights
from neo_native import Array, Control, ResultProducer, ResultSlot, StepConsumer
from neo_native.segments import SegmentSet
from neo_native.timeline import Timeline
from protos.config import EngineConfig, PlanMode
from protos.model_config import ModelConfig

logger = logging.getLogger(__name__)

POLL_S = 0.2  # how soon an idle worker notices that the server is gone
BUSY_POLL_S = 50e-6  # between looks at the step ring while a plan runs
FULL_RING_PAUSE_S = 0.001
READY = 2  # WorkerState of protos/wire.hpp


class GpuWorker:
    """Model, caches and rings of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        segments: SegmentSet,
        rank: int,
        asked_to_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        """Loads the model and sizes the GPU-cache. The caller holds the lock of its rank.

        Raises ``GpuWorkerError`` or ``UnsupportedModelError``; ``asked_to_leave`` is how a signal
        handler ends ``run``.
        """
        geometry = segments.geometry
        self.device = select_device(config, rank)
        model_config = ModelConfig.from_pretrained(config.model_path)
        check_geometry(geometry, model_config, config, rank)
        model = _load_model(config, model_config, self.device)
        self._segments = segments
        self._asked_to_leave = asked_to_leave
        self._rank = rank
        self._control = Control(segments.control)
        parts = Parts(config, model, segments, self._control, lambda: not self.leaving())
        self._backend = make_backend(parts)
        if (timeline := Timeline.attach(segments.location)) is not None:
            self._backend.runner.record(timeline)
        self.num_gpu_blocks = self._backend.num_gpu_blocks
        self._config = config
        self._world_size = int(geometry["world_size"])
        # The lock of this rank is held, so whoever the rings still name is dead.
        self._steps = StepConsumer(segments.steps, geometry, takeover=True)
        self._results = ResultProducer(segments.results, geometry, takeover=True)

    @property
    def plan_modes(self) -> tuple[PlanMode, ...]:
        """Kinds of plan that this worker runs."""
        return self._backend.modes

    def profile(self) -> str:
        """The table of stage times, stored or measured now, as JSON; "" where it is off."""
        if not self._config.worker.profile:
            return ""
        offloads = self._config.offloads and "one_batch" in self.plan_modes
        threads = self._wait_for_cpu_threads() if offloads else 0
        device = device_name(self.device)
        key = profile_key(self._config, device, self._world_size, threads, offloads=offloads)
        folder = self._config.worker.profile_dir
        return load_or_profile(key, folder, lambda: self._backend.profiler.run(threads))

    def _wait_for_cpu_threads(self) -> int:
        """Attention threads of all workers, once those that the server starts are there."""
        wanted = self._config.worker.cpu_attn_workers
        deadline = time.monotonic() + WORKERS_WAIT_S
        while True:
            rows = self._control.worker_rows()
            ready = rows[rows["state"] == READY]
            if len(ready) >= wanted or time.monotonic() > deadline or self.leaving():
                return int(ready["n_threads"].sum())
            time.sleep(POLL_S / 10)

    def run(self) -> None:
        """Serves plans until it is time to leave. Raises ``BadPlanError``.

        A plan that is there is submitted before the one ahead of it is collected, so that the
        device goes from one to the next without the host.
        """
        runner = self._backend.runner
        while not self.leaving():
            wait_s = POLL_S if runner.pending == 0 else BUSY_POLL_S
            if not runner.full and (plan := self.recv_plan(wait_s)) is not None:
                runner.submit(plan)
                self._steps.release()
            elif runner.full or runner.ready():
                self.send_result(runner.collect())
        while runner.pending:
            self.send_result(runner.collect())
        logger.info("plans: %s", runner.summary())

    def leaving(self) -> bool:
        """Nobody waits for results any more, or a signal asked this process to leave."""
        return self._asked_to_leave() or is_abandoned(self._segments, self._control, self._rank)

    def recv_plan(self, wait_s: float = POLL_S) -> Any:
        """The oldest plan on the step ring, or None when none came within ``wait_s``."""
        if not self._steps.wait(wait_s):
            return None
        step = self._steps.front()
        return None if step is None else self._backend.reader.read(step)

    def send_result(self, outcome: Outcome) -> None:
        """Puts the outcome on the result ring, waiting for room while the server lives."""
        while (slot := self._results.acquire()) is None:
            if self.leaving():
                return
            time.sleep(FULL_RING_PAUSE_S)
        write_header(slot.header, outcome, self._rank)
        rows = slot.rows[: len(outcome.slots)]
        rows["slot"] = outcome.slots
        rows["status"] = outcome.status
        rows["token"] = outcome.tokens
        rows["logprob"] = outcome.logprobs
        slot.header["n_logprobs"] = write_reports(slot, outcome.reports)
        self._results.publish()


def write_reports(slot: ResultSlot, reports: Iterable[Report]) -> int:
    """Fills the entries of a result; returns how many."""
    at = 0
    for report in reports:
        n = len(report.rows)
        ints, floats = report.ints.cpu().numpy(), report.floats.cpu().numpy()
        entries, top = slot.logprobs[at : at + n], slot.top[at : at + n, : ints.shape[1] - 2]
        entries["row"], entries["position"] = report.rows, report.positions
        entries["n_top"] = report.n_top
        entries["token"], entries["rank"] = ints[:, 0], ints[:, 1]
        entries["logprob"] = floats[:, 0]
        top["token"], top["logprob"] = ints[:, 2:], floats[:, 1:]
        at += n
    return at


def write_header(header: Array, outcome: Outcome, rank: int) -> None:
    """Fills a ``ResultHeader``."""
    times = outcome.times
    header["plan_id"] = outcome.plan_id
    header["n_rows"] = len(outcome.slots)
    header["rank"] = rank
    header["elapsed"] = times.elapsed
    header["linear"] = times.linear
    header["gpu_attn"] = times.gpu_attn
    header["cpu_wait"] = times.cpu_wait
    header["handoff"] = times.handoff
    header["swap"] = times.swap
    header["head"] = times.head
    header["cpu_tasks"] = outcome.cpu_tasks
    header["ride_wait"] = times.ride_wait


def select_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of this rank; sets PyTorch's thread count. Raises ``DeviceError``."""
    if config.worker.torch_threads:
        torch.set_num_threads(config.worker.torch_threads)
    if config.worker.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "device is 'cuda', but this PyTorch finds no CUDA device; --device cpu needs none"
        )
    if rank >= torch.cuda.device_count():
        raise DeviceError(f"rank is {rank}; there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", rank)


def device_name(device: torch.device) -> str:
    """For people: ``cpu`` or ``NVIDIA T4``."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def _load_model(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> LlamaModel:
    begin = time.perf_counter()
    weights = _load_weights(config, model_config, device)
    seconds = time.perf_counter() - begin
    logger.info("loaded %s in %.1f s", config.model_path, seconds)
    positions = config.scheduler.max_model_len
    return LlamaModel(model_config, weights, ops.select(device), positions)


def _load_weights(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> LlamaWeights:
    dtype = TORCH_DTYPES[config.worker.dtype]
    if config.worker.load_format == "dummy":
        return dummy_weights(model_config, dtype, device, config.worker.seed)
    return load_weights(config.model_path, model_config, dtype, device)
