"""Swaps, later chunks and pairs of batches through the CUDA path's kernels, in the interpreter.

Against the plain executor; the cpu workers are real.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neo_native import RowKind, SwapKind, WireDType
from tests.helpers.engine_rig import Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda import exchange as device_exchange
from gpu_worker.cuda.buckets import Shape, decode_shape, mixed_shape
from gpu_worker.cuda.copies import Copies
from gpu_worker.cuda.plan import HostBatch
from gpu_worker.cuda.tiles import CopyTiles
from tests.unit.gpu_worker.cuda.interpreted import (
    RIDES,
    TOLERANCE,
    Device,
    interpretable,
    model,
)

__all__ = ["interpretable", "model"]  # fixtures; the first of every test


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these short sequences are several groups of tokens, more than there are programs."""
    tiles = CopyTiles(programs=3, rows=8, tiles=2, warps=4)
    monkeypatch.setattr(device_exchange, "copy_tiles", lambda *_: tiles)


class CopyingDevice(Device):
    """As ``Device``, with swaps, launched kernel by kernel."""

    copies: Copies | None = None

    def run(self, step: Any) -> Any:
        stages = self.stages
        if self.copies is None:
            self.copies = self.exchange.copies(stages.cache.blocks, 2)
        plan = self._reader.read(step)
        self.copies.start(plan)
        if any(batch.cpu_chunks for batch in plan.batches):
            self.copies.hold()
        given = super().run(step)
        self.copies.finish(plan)
        return given


def padded(batch: HostBatch) -> Shape:
    """As for a graph, though smaller."""
    if batch.decodes_only:
        return replace(decode_shape(batch.channel, 3, cpu=True), splits=1)
    return replace(mixed_shape(24, 2, 1, cpu=True), cpu_rows=2, tiles=4)


class Both:
    """The plain executor and the device."""

    def __init__(self, folder: Path, shape_of: Any, **fields: int) -> None:
        self.rig = (
            Rig(folder, workers=1, **RIDES, **fields)
            if fields
            else Rig(folder, cpu_side=FakeCpuSide(), **RIDES)
        )
        self.device = CopyingDevice(self.rig, folder, shape_of, **fields)
        self.device.start_worker()

    def compare(self, *batches: list[Row], swaps: Any = ()) -> None:
        """One plan through both; logits of every sampled row."""
        step = self.rig.step(*batches, swaps=swaps)
        self.rig.logits.clear()
        outcome = self.rig.executor.run(self.rig.reader.read(step))
        given = self.device.run(step)
        assert len(self.rig.logits) == 1
        torch.testing.assert_close(given.logits, self.rig.logits[0], atol=TOLERANCE, rtol=0)
        assert given.tokens == outcome.tokens[outcome.tokens >= 0].tolist()

    def close(self) -> None:
        self.device.close()
        self.rig.close()


@pytest.mark.parametrize("shape_of", [Shape.of, padded], ids=["exact", "padded"])
def test_prefills_and_decodes_beside_a_second_batch_of_cpu_decodes(
    shape_of: Any, model: Any
) -> None:
    both, tokens = Both(model[0], shape_of), model[1]
    prompts = [Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:4]) for s in (1, 2)]
    both.compare([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:4]), *prompts])
    first = [
        Row(3, RowKind.PREFILL_GPU, 0, tokens[3][:7]),
        Row(4, RowKind.PREFILL_CPU, 0, tokens[4][:6]),
        Row(0, RowKind.DECODE_GPU, 4, [tokens[0][4]]),
        Row(1, RowKind.DECODE_CPU, 4, [tokens[1][4]]),
    ]
    both.compare(first, [Row(2, RowKind.DECODE_CPU, 4, [tokens[2][4]])])
    both.close()


def moved(both: Both, tokens: list[list[int]]) -> None:
    """Out and in again, each in the plan that needs it at once; two sequences at a time."""
    prompt = 17  # two groups of tokens, three blocks, two pages
    both.compare([Row(s, RowKind.PREFILL_GPU, 0, tokens[s][:prompt]) for s in (0, 1)])
    moves = (SwapKind.OUT, RowKind.DECODE_CPU), (SwapKind.IN, RowKind.DECODE_GPU)
    for at, (kind, row) in enumerate(moves, prompt):
        rows = [Row(s, row, at, [tokens[s][at]]) for s in (0, 1)]
        both.compare(rows, swaps=[(s, kind, at) for s in (0, 1)])


@pytest.mark.parametrize("fields", [{}, {"kv_dtype": WireDType.INT8}], ids=["as computed", "int8"])
def test_swapped_sequences_go_on_at_once(fields: dict[str, int], model: Any) -> None:
    both = Both(model[0], Shape.of, **fields)
    moved(both, model[1])
    both.close()


@pytest.mark.parametrize("at_once", [2, 1])
def test_later_chunks_attend_over_what_the_chunks_before_left(at_once: int, model: Any) -> None:
    """Two in a plan, or one in the place that a graph has for it."""
    both, tokens = Both(model[0], Shape.of if at_once > 1 else padded), model[1]
    both.compare([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:9])])
    for start, end in ((0, 5), (5, 18), (18, 24)):
        slots = (1, 2)[:at_once] if end < 24 else (1,)
        both.compare([Row(s, RowKind.PREFILL_CPU, start, tokens[s][start:end]) for s in slots])
    both.compare(  # what was swapped out in this very plan
        [Row(0, RowKind.PREFILL_CPU, 9, tokens[0][9:15])], swaps=[(0, SwapKind.OUT, 9)]
    )
    both.close()
