"""Requested biases, penalties and log-probabilities on the CUDA path's buffers, against the plain
executor, in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.features import Features, Report
from gpu_worker.plan_check import UNKNOWN_TOKEN
from neo_native import Feature, RowKind
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import BLOCK_SIZE, CPU, MAX_LEN, MAX_SLOTS, Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.drawing import Drawing
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.stages import Stages
from gpu_worker.kv_pool import GpuCache

TOLERANCE = 1e-4
PROMPT, CHUNK, STEPS = 9, 5, 3


class Device:
    """What the CUDA executor does with a plan, on this machine."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        config = ModelConfig.from_pretrained(folder)
        self._reader = HostPlanReader(rig.sequences, rig.limits)
        cache = GpuCache(config, MAX_SLOTS * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, torch.float32, CPU)
        buffers = Buffers(config, rig.limits, self._reader.layout, torch.float32, CPU, True)
        self._stages = Stages(rig.model, cache, buffers, None, MAX_LEN)
        features = Features(CPU, MAX_SLOTS, MAX_LEN, config.vocab_size, rig.model.logits)
        self._drawing = Drawing(buffers, features)

    @torch.inference_mode()
    def run(self, rig: Rig, *rows: list[Row]) -> tuple[list[int], list[float], list[Report]]:
        plan = self._reader.read(rig.step(*rows))
        buffers, reports = self._stages.buffers, []
        for batch in plan.batches:
            buffers.channels[batch.channel].meta[: batch.used] = torch.from_numpy(
                batch.meta[: batch.used]
            )
        self._drawing.record(plan)
        self._stages.forward(
            [Shape.of(batch) for batch in plan.batches],
            lambda shape: reports.extend(self._drawing.prompt_reports(plan, shape)),
        )
        reports += self._drawing.draw(plan)
        tokens, logprobs = [], []
        for batch in plan.batches:
            tokens += buffers.tokens_out(batch.channel)[: batch.n_sampled].tolist()
            logprobs += buffers.logprobs_out(batch.channel)[: batch.n_sampled].tolist()
        return tokens, logprobs, [report.fetched() for report in reports]


def want(rig: Rig) -> None:
    """Three slots with features and one without; two of the four draw."""
    params = rig.sequences.params
    wanted = Feature.PENALTIES | Feature.LOGPROBS | Feature.PROMPT_LOGPROBS
    params["features"][:3] = [wanted, Feature.BIASES, Feature.LOGPROBS]
    params["n_prompt"], params["n_logprobs"], params["n_prompt_logprobs"] = PROMPT, 4, 2
    params["repetition_penalty"], params["frequency_penalty"] = 2.0, 0.5
    params["temperature"][:4] = [0.0, 0.0, 1.0, 1.0]
    params["seed"][:4] = range(4)
    params["n_biases"][1] = 1
    rig.sequences.bias[1, 0] = (11, 3.0)


def test_iterations_with_features_equal_the_plain_executor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rig = Rig(tmp_path, cpu_side=FakeCpuSide())
    want(rig)
    device = Device(rig, tmp_path)
    ids = np.random.default_rng(2).integers(3, 320, (4, PROMPT)).tolist()
    prefill = RowKind.PREFILL_GPU
    plans = [
        ([Row(0, prefill, 0, ids[0][:CHUNK], sample=False)], [Row(3, prefill, 0, ids[3])]),
        (
            [Row(0, prefill, CHUNK, ids[0][CHUNK:])],
            [Row(slot, prefill, 0, ids[slot]) for slot in (1, 2)],
        ),
    ]
    for i in range(STEPS):
        decodes = [Row(s, RowKind.DECODE_GPU, PROMPT + i, [UNKNOWN_TOKEN]) for s in (0, 1, 2)]
        plans.append((decodes[:1], decodes[1:]))
    n_entries = 0
    for plan in plans:
        expected = rig.run(*plan)
        tokens, logprobs, reports = device.run(rig, *plan)
        sampled = expected.tokens >= 0
        assert tokens == expected.tokens[sampled].tolist()
        assert logprobs == pytest.approx(expected.logprobs[sampled].tolist(), abs=TOLERANCE)
        for found, wanted in zip(reports, expected.reports, strict=True):
            assert found.rows.tolist() == wanted.rows.tolist()
            assert found.positions.tolist() == wanted.positions.tolist()
            assert found.ints.tolist() == wanted.ints.tolist()
            torch.testing.assert_close(found.floats, wanted.floats, atol=TOLERANCE, rtol=0)
            n_entries += len(found.rows)
    assert n_entries == PROMPT - 1 + 2 * (1 + STEPS)
