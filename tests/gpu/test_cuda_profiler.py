"""Hand-offs and CPU attention are measured in captured graphs, with cpu workers or without."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_worker.cuda.profiler import STAGED, STORED, CudaProfiler
from gpu_worker.profiler import LEAST_S, up_to
from neo_native import WireDType
from protos.config import DType
from tests.gpu.kernel_rig import LEN, MAX_TOKENS, SLOTS, KernelRig, config_of

ROWS = [1, 4, SLOTS]


@pytest.fixture
def rig() -> Iterator[KernelRig]:
    made = KernelRig(config_of(64, 4, 2), DType.BFLOAT16, kv_code=WireDType.INT8)
    with torch.inference_mode():
        yield made
    made.close()


def profiler_of(rig: KernelRig) -> CudaProfiler:
    nothing: Any = None
    made = CudaProfiler(rig.stages.model, rig.cache, nothing, MAX_TOKENS, SLOTS, LEN)
    assert rig.exchange is not None
    made.use(rig.stages, rig.exchange._native)
    made._threads, made._deadline = 2, inf
    return made


def test_every_layer_of_every_measurement_is_attended_to(rig: KernelRig) -> None:
    profiler, exchange = profiler_of(rig), rig.exchange
    assert exchange is not None
    with rig.worker(threads=2):
        handoffs = profiler._handoff_curve(ROWS)
        surface = profiler._cpu_surface(ROWS, [64, LEN])
    assert surface is not None
    assert min(handoffs["seconds"]) > 0
    assert all(seconds >= LEAST_S for line in surface["seconds"] for seconds in line)
    assert exchange.done_epoch(0) >= rig.config.num_hidden_layers * 3 * len(ROWS)
    assert exchange.done_epoch(0) % rig.config.num_hidden_layers == 0
    assert not rig.buffers.voided(0).item()


def test_later_chunks_are_measured_with_what_they_fetch(rig: KernelRig) -> None:
    profiler, exchange = profiler_of(rig), rig.exchange
    assert exchange is not None
    exchange.tiles.fill_(0x3F)  # all bytes, scales too
    value = 0x3F * struct.unpack("f", b"\x3f" * 4)[0]
    rig.buffers.staging.zero_()
    curve = profiler._staging()
    assert curve is not None
    assert curve["x"] == [float(x) for x in up_to(STAGED, LEN)]
    assert min(curve["seconds"]) >= 0.0
    fetched = rig.buffers.staging[:, :, 0, : int(curve["x"][-1])]
    torch.testing.assert_close(fetched, torch.full_like(fetched, value))
    profiler._threads = 0
    assert profiler._staging() is None


def test_the_stores_of_cpu_prefills_are_measured_as_they_store(rig: KernelRig) -> None:
    profiler, exchange = profiler_of(rig), rig.exchange
    assert exchange is not None
    exchange.tiles.zero_()
    curve = profiler._storing()
    assert curve is not None
    assert curve["x"] == [float(x) for x in up_to(STORED, MAX_TOKENS)]
    tile = exchange.tiles[: exchange.page_size * rig.config.head_dim]  # K of a head
    assert tile.view(exchange.page_size, -1).ne(0).any(dim=1).all()
    assert max(curve["seconds"]) > 0.0
    profiler._threads = 0
    assert profiler._storing() is None


def test_measurements_end_without_cpu_workers(rig: KernelRig) -> None:
    profiler, exchange = profiler_of(rig), rig.exchange
    assert exchange is not None
    exchange.timeout_s = 0.2
    assert profiler._handoff_curve(ROWS)["seconds"] == [0.0] * len(ROWS)
    assert profiler._cpu_surface(ROWS, [64]) is None
    exchange.timeout_s, profiler._threads = 10.0, 2
    with rig.worker(threads=2):
        assert min(profiler._handoff_curve(ROWS)["seconds"]) > 0
    assert not rig.buffers.voided(0).item()
