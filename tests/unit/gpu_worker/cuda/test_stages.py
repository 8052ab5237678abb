"""Whole iterations of the CUDA path's kernels against the plain executor, in Triton's interpreter:
as the batch is, and padded to the shapes that graphs are captured with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from neo_native import RowKind
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import BLOCK_SIZE, CPU, MAX_LEN, MAX_SLOTS, Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda.buckets import Shape, decode_shape, mixed_shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.plan import HostBatch
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.stages import Stages
from gpu_worker.kv_pool import GpuCache

TOLERANCE = 1e-4
SLOTS, ITERATIONS, MOST_NEW = 3, 5, 12  # the interpreter takes some 0.2 ms a program and step


def padded(batch: HostBatch) -> Shape:
    """A bucket, as for a graph."""
    if batch.decodes_only and batch.n_sampled == batch.n_tokens:
        return decode_shape(batch.channel, 4, cpu=False)
    return mixed_shape(64, 4, 2, cpu=False)


def traffic(draw: np.random.Generator, tokens: list[list[int]], done: list[int]) -> list[Row]:
    """Prefills, chunks and decodes of some of the slots."""
    rows = []
    for slot in range(SLOTS):
        if draw.random() > 0.75 or done[slot] > MAX_LEN - MOST_NEW:
            continue
        decode = done[slot] > 0 and draw.random() < 0.6
        new = 1 if decode else int(draw.integers(1, MOST_NEW))
        kind = RowKind.DECODE_GPU if decode else RowKind.PREFILL_GPU
        ids = tokens[slot][done[slot] : done[slot] + new]
        rows.append(Row(slot, kind, done[slot], ids, decode or bool(draw.random() < 0.8)))
        done[slot] += new
    return sorted(rows, key=lambda row: row.kind)


class Device:
    """The stages on buffers and a cache of their own."""

    def __init__(self, rig: Rig, folder: Path, shape_of: Callable[[HostBatch], Shape]) -> None:
        config = ModelConfig.from_pretrained(folder)
        self._reader = HostPlanReader(rig.sequences, rig.limits)
        blocks = MAX_SLOTS * MAX_LEN // BLOCK_SIZE
        cache = GpuCache(config, blocks, BLOCK_SIZE, torch.float32, CPU)
        buffers = Buffers(config, rig.limits, self._reader.layout, torch.float32, CPU, False)
        self._stages = Stages(rig.model, cache, buffers, None, MAX_LEN)
        self._shape_of = shape_of

    def run(self, rig: Rig, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, tokens and log-probabilities of the sampled rows."""
        plan = self._reader.read(rig.step(rows))
        (batch,) = plan.batches
        buffers = self._stages.buffers
        buffers.channels[0].meta[: batch.used] = torch.from_numpy(batch.meta[: batch.used])
        with torch.inference_mode():
            self._stages.forward([self._shape_of(batch)])
        n = batch.n_sampled
        return (
            buffers.logits[0, :n].clone(),
            buffers.tokens_out(0)[:n].clone(),
            buffers.logprobs_out(0)[:n].clone(),
        )


@pytest.mark.parametrize("kind", ["llama2", "llama3.2"])
def test_iterations_equal_the_plain_executor(kind: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, kind).config
    rig = Rig(tmp_path, cpu_side=FakeCpuSide())
    draw = np.random.default_rng(3)
    tokens = draw.integers(3, config.vocab_size, (SLOTS, MAX_LEN)).tolist()
    done = [0] * SLOTS
    devices = [Device(rig, tmp_path, shape_of) for shape_of in (Shape.of, padded)]
    compared = 0
    for _ in range(ITERATIONS):
        rows = traffic(draw, tokens, done)
        if not any(row.sample for row in rows):
            continue
        rig.run(rows)
        expected = rig.logits[0]
        best = expected.argmax(-1)
        share = expected.log_softmax(-1).gather(1, best[:, None])[:, 0]
        for device in devices:
            logits, chosen, logprobs = device.run(rig, rows)
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
            assert chosen.tolist() == best.tolist()
            torch.testing.assert_close(logprobs, share, atol=TOLERANCE, rtol=0)
        compared += len(best)
    assert compared > ITERATIONS
