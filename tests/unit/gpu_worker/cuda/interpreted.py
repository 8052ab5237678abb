"""Stages of the CUDA path in Triton's interpreter, for tests on machines without a device.

The cpu workers are real; only what the interpreter lacks (system-scope loads and stores, the
device's clock) and the pinning are replaced. Needs Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import neo_native as native
from gpu_worker.cuda import exchange as device_exchange
from gpu_worker.cuda import handoff, ride_kernel
from gpu_worker.cuda.buckets import Shape, decode_shape, mixed_shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.plan import HostBatch
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.rides import VoidRiders
from gpu_worker.cuda.stages import Stages
from gpu_worker.kv_pool import GpuCache
from neo_native.segments import SegmentSet
from protos.config import DType
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import (
    BLOCK_SIZE,
    CPU,
    MAX_LEN,
    MAX_SLOTS,
    Rig,
    make_geometry,
    make_segment,
)
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

TOLERANCE = 1e-4
LAYERS, PLACES = 3, 2
RIDES = {"ride_groups": LAYERS + 1, "ride_capacity": PLACES}


@triton.jit
def load_plain(address):  # type: ignore[no-untyped-def]
    return tl.load(address)


@triton.jit
def store_plain(address, value):  # type: ignore[no-untyped-def]
    tl.store(address, value)


@triton.jit
def no_clock(like):  # type: ignore[no-untyped-def]
    return like * 0


class Unpinned:
    """``MappedSegment`` without a driver."""

    def __init__(self, segment: native.Segment) -> None:
        self._segment = segment
        buffer = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        self._bytes = torch.from_numpy(np.ctypeslib.as_array(buffer))

    def view(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        rest = self._bytes[offset:]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)


@pytest.fixture(autouse=True)
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_load_acquire", load_plain)
    monkeypatch.setattr(handoff, "store_release", store_plain)
    monkeypatch.setattr(handoff, "_now_ns", no_clock)
    monkeypatch.setattr(ride_kernel, "load_acquire", load_plain)
    monkeypatch.setattr(ride_kernel, "load_flag", load_plain)
    monkeypatch.setattr(ride_kernel, "store_flag", store_plain)
    monkeypatch.setattr(ride_kernel, "store_release", store_plain)
    monkeypatch.setattr(ride_kernel, "now_ns", no_clock)
    monkeypatch.setattr(ride_kernel, "pause", no_clock)
    monkeypatch.setattr(device_exchange, "MappedSegment", Unpinned)


@dataclass
class Given:
    """What a plan gave."""

    logits: torch.Tensor
    tokens: list[int]
    void: list[int]


class Device:
    """Stages, buffers, caches and segments of their own."""

    def __init__(
        self, rig: Rig, folder: Path, shape_of: Callable[[HostBatch], Shape], **fields: int
    ) -> None:
        config = ModelConfig.from_pretrained(folder)
        geometry = make_geometry(config, DType.FLOAT32, **RIDES, **fields)
        kinds = native.SegmentKind
        s = SimpleNamespace(
            geometry=geometry,
            control=make_segment(kinds.CONTROL, geometry),
            work=make_segment(kinds.WORK, geometry),
            exchange=make_segment(kinds.EXCHANGE, geometry),
            cpu_cache=make_segment(kinds.CPU_CACHE, geometry),
            sequences=make_segment(kinds.SEQUENCES, geometry),
        )
        sequences = native.Sequences(s.sequences, geometry)
        for name in ("block_table", "page_table", "params"):
            getattr(sequences, name)[:] = getattr(rig.sequences, name)
        self._segments = s
        self._control = native.Control(s.control)
        self.native = native.Exchange(self._control, s.work, s.exchange, geometry)
        self._reader = HostPlanReader(sequences, rig.limits)
        blocks = MAX_SLOTS * MAX_LEN // BLOCK_SIZE
        cache = GpuCache(config, blocks, BLOCK_SIZE, torch.float32, CPU)
        layout = self._reader.layout
        self._buffers = Buffers(config, rig.limits, layout, torch.float32, CPU, True)
        self._buffers.stage_for(config, MAX_LEN)
        self.exchange = device_exchange.DeviceExchange(
            self.native, cast(SegmentSet, s), self._reader, torch.float32, 10.0, CPU
        )
        self.stages = Stages(rig.model, cache, self._buffers, self.exchange, MAX_LEN)
        self._shape_of = shape_of
        self._void = VoidRiders(self._reader.ride_layout)
        self._workers: list[native.AttentionWorker] = []

    def start_worker(self) -> None:
        s = self._segments
        worker = native.AttentionWorker(
            self._control, s.work, s.exchange, s.cpu_cache, s.sequences, 0, 1, []
        )
        worker.start()
        self._workers.append(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, step: Any) -> Given:
        """As ``CudaExecutor`` does it."""
        plan, buffers = self._reader.read(step), self._buffers
        has_cpu = plan.rides is not None or any(batch.n_cpu_rows for batch in plan.batches)
        if has_cpu:
            self.exchange.announce(plan)
        for batch in plan.batches:
            meta = buffers.channels[batch.channel].meta
            meta[: batch.used] = torch.from_numpy(batch.meta[: batch.used])
        if plan.rides is not None:
            assert buffers.rides is not None
            buffers.rides.meta.copy_(torch.from_numpy(plan.rides.meta))
        with torch.inference_mode():
            self.stages.forward([self._shape_of(batch) for batch in plan.batches])
        if has_cpu:
            self.exchange.retire(plan)
        lost = np.zeros(len(plan.slots), np.bool_)
        given_up = buffers.rides_voided.numpy()
        void = self._void.rows(plan.rides, given_up, lost).tolist() if plan.rides else []
        assert buffers.rides is not None
        assert not buffers.rides.arrived.any(), "a replayed graph counts from zero"
        logits = [buffers.logits[b.channel, : b.n_sampled] for b in plan.batches]
        tokens = [buffers.tokens_out(b.channel)[: b.n_sampled] for b in plan.batches]
        return Given(torch.cat(logits).clone(), torch.cat(tokens).tolist(), void)


def padded(batch: HostBatch) -> Shape:
    """Wider than the batch, as for a graph."""
    if batch.decodes_only:
        cpu = batch.n_cpu_rows > 0
        shape = replace(decode_shape(batch.channel, 3, cpu), splits=1)
    else:
        shape = replace(mixed_shape(24, 2, 1, batch.to_cpu), tiles=4)  # all that these plans need
    return shape.with_riders(PLACES) if batch.lead else shape


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder: Path = tmp_path_factory.mktemp("model")
    config = make_checkpoint(folder, "llama3.2").config
    draw = np.random.default_rng(3)
    return folder, draw.integers(3, config.vocab_size, (8, MAX_LEN)).tolist()


Make = Callable[..., Device]


@pytest.fixture
def make(model: Any) -> Iterator[tuple[Rig, Make]]:
    rig = Rig(model[0], cpu_side=FakeCpuSide(), **RIDES)
    made: list[Device] = []

    def device(shape_of: Callable[[HostBatch], Shape], **fields: int) -> Device:
        made.append(Device(rig, model[0], shape_of, **fields))
        return made[-1]

    yield rig, device
    for one in made:
        one.close()
