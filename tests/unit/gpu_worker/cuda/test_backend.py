"""What the CUDA backend captures and reports, by policy and by whether the driver pins.

Everything is built as on a device, but for kernels, graphs and the executor's events.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import neo_native as native
from gpu_worker import ops
from gpu_worker.backends import Backend, Parts
from gpu_worker.errors import DeviceError, PinningError
from gpu_worker.model import LlamaModel
from gpu_worker.weights import dummy_weights
from protos.config import (
    PLAN_MODES,
    CacheConfig,
    DType,
    EngineConfig,
    PlanMode,
    SchedulerConfig,
    WorkerConfig,
)
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import BLOCK_SIZE, CPU, MAX_LEN, make_geometry, make_segment
from tests.helpers.tiny_llama import make_checkpoint

pytest.importorskip("triton")

from gpu_worker.cuda import backend, pinning

BLOCKS, PLACES = 16, 2


class Unpinned:
    """``MappedSegment`` without a driver."""

    def __init__(self, segment: native.Segment) -> None:
        self._bytes = torch.zeros(segment.size, dtype=torch.uint8)

    def view(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        rest = self._bytes[offset:]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)


def refuses(segment: native.Segment) -> None:
    raise PinningError("the driver refuses")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[set[PlanMode]]:
    """Kinds of plan that graphs were asked for."""
    found: list[set[PlanMode]] = []

    def graphs(*_: Any) -> Any:
        def capture(modes: Collection[PlanMode]) -> None:
            found.append(set(modes))

        return SimpleNamespace(capture=capture)

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(backend, "_transient_bytes", lambda *_: 0)
    monkeypatch.setattr(backend, "_warm_up", lambda *_: None)
    monkeypatch.setattr(backend, "Graphs", graphs)
    monkeypatch.setattr(
        backend, "CudaExecutor", lambda *given, **_: SimpleNamespace(stages=given[0])
    )
    monkeypatch.setattr(pinning, "MappedSegment", Unpinned)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(made)
    return made


def built(
    folder: Path,
    gib: float = 1.0,
    modes: tuple[PlanMode, ...] = PLAN_MODES,
    *,
    eager: bool = False,
) -> Backend:
    config = EngineConfig(
        model_path=str(folder),
        cache=CacheConfig(
            block_size=BLOCK_SIZE, num_gpu_blocks_override=BLOCKS, kv_offloading_size=gib
        ),
        scheduler=SchedulerConfig(max_model_len=MAX_LEN, plan_modes=modes),
        worker=WorkerConfig(enforce_eager=eager),
    )
    shape = ModelConfig.from_pretrained(folder)
    rides = {"ride_groups": shape.num_hidden_layers + 1, "ride_capacity": PLACES}
    geometry = make_geometry(shape, DType.FLOAT32, **rides)
    kinds = native.SegmentKind
    segments: Any = SimpleNamespace(
        geometry=geometry,
        work=make_segment(kinds.WORK, geometry),
        exchange=make_segment(kinds.EXCHANGE, geometry),
        cpu_cache=make_segment(kinds.CPU_CACHE, geometry),
        sequences=make_segment(kinds.SEQUENCES, geometry),
    )
    control = native.Control(make_segment(kinds.CONTROL, geometry))
    weights = dummy_weights(shape, torch.float32, CPU, 0)
    model = LlamaModel(shape, weights, ops.select(CPU), MAX_LEN)
    return backend.make_cuda_backend(Parts(config, model, segments, control, lambda: True))


def test_neo_has_all_kinds(folder: Path, captured: list[set[PlanMode]]) -> None:
    made: Any = built(folder)
    assert captured == [set(PLAN_MODES)]
    assert made.modes == PLAN_MODES
    assert made.runner.stages.exchange is not None
    assert made.reader.limits.ride_capacity == PLACES


def test_others_have_what_their_plans_need(folder: Path, captured: list[set[PlanMode]]) -> None:
    made: Any = built(folder, modes=("one_batch", "two_batches"))
    assert captured == [{"one_batch", "two_batches"}]
    assert made.modes == PLAN_MODES
    assert made.runner.stages.exchange is not None


@pytest.mark.parametrize("why", ["policy", "size", "driver"])
def test_without_offloading_there_is_nothing_of_it(
    why: str, folder: Path, captured: list[set[PlanMode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "MappedSegment", refuses)  # or is not asked
    gib = 0.0 if why == "size" else 1.0
    made: Any = built(folder, gib, ("gpu_only",) if why == "policy" else PLAN_MODES)
    assert captured == [{"gpu_only"}]
    assert made.modes == ("gpu_only",)
    stages = made.runner.stages
    assert stages.exchange is None
    assert stages.buffers.rides is None
    assert len(stages.buffers.channels) == 1
    assert made.reader.limits.ride_groups == made.reader.limits.ride_capacity == 0


def test_a_policy_with_cpu_requests_only_is_refused_if_the_driver_refuses(
    folder: Path, captured: list[set[PlanMode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "MappedSegment", refuses)
    with pytest.raises(DeviceError, match="CPU-requests only, but the driver refuses"):
        built(folder, modes=("one_batch",))
    assert captured == []


def test_memory_is_kept_for_the_graphs_that_are_captured(
    folder: Path, captured: list[set[PlanMode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More for more kinds of plan, none where nothing is captured."""
    kept: list[int] = []

    def blocks(*_: Any, activations: int) -> int:
        kept.append(activations)
        return BLOCKS

    monkeypatch.setattr(backend, "num_gpu_blocks", blocks)
    built(folder)
    built(folder, modes=("gpu_only",))
    built(folder, eager=True)
    assert captured == [set(PLAN_MODES), {"gpu_only"}]
    neo, gpu_only, eager = kept
    assert neo > gpu_only > eager == backend.LATER_RESERVE
