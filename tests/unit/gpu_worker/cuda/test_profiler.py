"""What the profiler of the CUDA path puts into the metadata."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.plan import MetaLayout
from gpu_worker.cuda.profiler import CudaProfiler
from gpu_worker.kv_pool import GpuCache
from gpu_worker.profiler import Profiler
from tests.unit.gpu_worker.cuda.test_buffers import CPU, LIMITS, config


def profiler_of(max_rows: int, max_length: int) -> tuple[CudaProfiler, Buffers]:
    model = cast(Any, SimpleNamespace(config=config(), device=CPU))
    buffers = Buffers(config(), LIMITS, MetaLayout(LIMITS), torch.float32, CPU, True)
    cache = GpuCache(config(), LIMITS.num_blocks, LIMITS.block_size, torch.float32, CPU)
    profiler = CudaProfiler(model, cache, cast(Any, None), 8, max_rows, max_length)
    profiler.use(cast(Any, SimpleNamespace(buffers=buffers)), cast(Any, None))
    return profiler, buffers


@pytest.mark.parametrize("stage", ["_linear", "_prefill_attn", "_head"])
def test_products_are_measured_on_data(stage: str) -> None:
    """Those of zeros take less power, so that a device at its limit is faster at them."""
    profiler, buffers = profiler_of(8, 64)
    getattr(profiler, stage)(5)
    channel = buffers.channels[0]
    for activations in (channel.residual, channel.qkv, channel.attn):
        assert activations[:5].std(dim=1).min() > 0.5
        assert not activations[5:].any()


@pytest.mark.parametrize("rows", [1, LIMITS.max_rows])
def test_the_longest_slot_of_the_cpu_cache_fits_the_block_tables(rows: int) -> None:
    """Its last page may reach past the last block of a table."""
    room = LIMITS.max_blocks * LIMITS.block_size
    profiler, buffers = profiler_of(rows, room + 1)
    profiler._gpu_attn(rows, room + 1)
    fields = buffers.channels[0].fields
    last = (rows - 1) * int(fields["table_stride"][0]) + (int(fields["row_lens"].max()) - 1) // 16
    assert fields["row_lens"][:rows].min() >= room
    assert last < len(fields["tables"])


def test_the_table_says_which_worker_copies_beside_its_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: Any = (SimpleNamespace(config=config(), device=CPU), None, None, 8, 8, 8)
    for kind, beside in ((CudaProfiler, True), (Profiler, False)):
        for stage in ("_curve", "_surface", "_prefill", "_ride_handoff", "_staging", "_storing"):
            monkeypatch.setattr(kind, stage, lambda *_: None)
        assert kind(*parts)._stages_table()["overlaps_transfers"] is beside
