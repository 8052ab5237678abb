"""Waves through the CUDA path's kernels against the plain executor, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from neo_native import RowKind, WireDType
from tests.helpers.engine_rig import Rig, Row

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.plan import HostBatch
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.rides import VoidRiders
from tests.unit.gpu_worker.cuda.interpreted import (
    LAYERS,
    RIDES,
    TOLERANCE,
    Device,
    Given,
    Make,
    interpretable,
    make,
    model,
    padded,
)

__all__ = ["interpretable", "make", "model"]  # fixtures; the first of every test

PROMPT = 6


def compare(rig: Rig, device: Device, *batches: list[Row], riders: list[Row]) -> Given:
    """One plan through both; logits and greedy tokens of every sampled row."""
    step = rig.step(*batches, riders=riders)
    rig.logits.clear()
    outcome = rig.executor.run(rig.reader.read(step))
    given = device.run(step)
    if not rig.logits:
        assert given.tokens == []
        return given
    expected = rig.logits[0]
    if len(batches) == 2:  # riders are in the first channel
        own = sum(row.sample for row in batches[0])
        last = sum(row.sample for row in riders)
        order = [*range(own), *range(len(expected) - last, len(expected))]
        order += range(own, len(expected) - last)
        expected = expected[order]
    torch.testing.assert_close(given.logits, expected, atol=TOLERANCE, rtol=0)
    assert sorted(given.tokens) == sorted(outcome.tokens[outcome.tokens >= 0].tolist())
    return given


def ride(slot: int, place: int, stage: int, position: int, token: int) -> Row:
    last = stage == LAYERS
    return Row(slot, RowKind.RIDE_CPU, position, [token], last, stage, place)


@pytest.mark.parametrize("shape_of", [Shape.of, padded])
def test_waves_equal_the_plain_executor(
    make: tuple[Rig, Make], model: Any, shape_of: Callable[[HostBatch], Shape]
) -> None:
    """Staggered groups beside prefills, decodes or nothing; one rider leaves in mid-wave."""
    (rig, device_of), tokens = make, model[1]
    device = device_of(shape_of)
    device.start_worker()
    prompts = [Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], False) for s in range(4)]
    compare(rig, device, prompts, riders=[])
    stages = {0: 0, 1: 0, 2: -1, 3: -3}  # of each slot's rider; below 0: it has not set out
    at = dict.fromkeys(stages, PROMPT)
    sampled = 0
    for plan in range(9):
        own: list[Row] = []
        if plan == 0:
            own = [Row(4, RowKind.PREFILL_GPU, 0, tokens[4][:PROMPT])]
        elif plan % 3:
            own = [Row(4, RowKind.DECODE_GPU, PROMPT + plan, [tokens[4][PROMPT + plan]])]
        elif plan == 3:
            own = [Row(5, RowKind.PREFILL_CPU, 0, tokens[5][:9], False)]
        if plan == 2:
            del stages[1]  # aborted
        places = {0: 0, 1: 1, 2: 5, 3: 6}
        riders = [
            ride(slot, places[slot], stage, at[slot], tokens[slot][at[slot]])
            for slot, stage in stages.items()
            if stage >= 0
        ]
        compare(rig, device, *([own] if own else []), riders=riders)
        sampled += sum(row.sample for row in riders)
        for slot, stage in stages.items():
            at[slot] += stage == LAYERS
            stages[slot] = 0 if stage == LAYERS else stage + 1
    assert sampled == 2 + 2 + 1


def test_riders_pass_with_two_sub_batches_and_ordinary_cpu_rows(
    make: tuple[Rig, Make], model: Any
) -> None:
    (rig, device_of), tokens = make, model[1]
    device = device_of(padded)
    device.start_worker()
    prompts = [Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], False) for s in range(3)]
    compare(rig, device, prompts, riders=[])
    for stage in range(LAYERS + 1):
        rows = [
            Row(s, RowKind.DECODE_CPU, PROMPT + stage, [tokens[s][PROMPT + stage]]) for s in (1, 2)
        ]
        rider = ride(0, 3, stage, PROMPT, tokens[0][PROMPT])
        batches = [rows[:1], rows[1:]] if stage % 2 else [rows]
        compare(rig, device, *batches, riders=[rider])


def test_a_riders_next_token_is_the_one_it_sampled(make: tuple[Rig, Make], model: Any) -> None:
    (rig, device_of), tokens = make, model[1]
    device = device_of(padded)
    device.start_worker()
    compare(rig, device, [Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT])], riders=[])
    for position in (PROMPT, PROMPT + 1):
        for stage in range(LAYERS + 1):
            compare(rig, device, riders=[ride(0, 2, stage, position, -1)])


def test_an_int8_cache_takes_riders(model: Any, make: tuple[Rig, Make]) -> None:
    """Against decodes of kind decode_cpu on an int8 cache, which differ from float32's."""
    device_of, tokens = make[1], model[1]
    rig = Rig(model[0], workers=1, kv_dtype=WireDType.INT8, **RIDES)
    device = device_of(Shape.of, kv_dtype=WireDType.INT8)
    device.start_worker()
    compare(rig, device, [Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT])], riders=[])
    for stage in range(LAYERS + 1):
        compare(rig, device, riders=[ride(0, 2, stage, PROMPT, tokens[0][PROMPT])])
    rig.close()


def test_a_rider_that_is_given_up_is_void_until_stage_0(make: tuple[Rig, Make], model: Any) -> None:
    (rig, device_of), tokens = make, model[1]
    device = device_of(padded)
    rows = [Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT], False)]
    device.run(rig.step(rows))
    own = [Row(4, RowKind.PREFILL_GPU, 0, tokens[4][:PROMPT])]
    expected = device.run(rig.step(own)).logits
    assert device.run(rig.step(riders=[ride(0, 3, 0, PROMPT, 7)])).void == []
    device.native.ride_abort_through(1)  # nobody works: the watchdog
    given = device.run(rig.step(own, riders=[ride(0, 3, 1, PROMPT, 0)]))
    assert given.void == [1]
    torch.testing.assert_close(given.logits, expected)
    device.start_worker()
    assert device.run(rig.step(riders=[ride(0, 3, 2, PROMPT, 0)])).void == [0]
    compare(rig, device, rows, riders=[])
    for stage in range(LAYERS + 1):
        given = compare(rig, device, riders=[ride(0, 3, stage, PROMPT, tokens[0][PROMPT])])
        assert given.void == []


def test_a_row_whose_token_never_came_is_void(make: tuple[Rig, Make], model: Any) -> None:
    rig = make[0]
    reader = HostPlanReader(rig.sequences, rig.limits)
    void = VoidRiders(reader.ride_layout)
    none = np.zeros(LAYERS + 1, np.int32)
    for stage in range(LAYERS + 1):
        riders = [ride(s, s, stage, PROMPT, -1) for s in (0, 1)]
        plan = reader.read(rig.step([Row(4, RowKind.PREFILL_GPU, 0, [5, 6])], riders=riders))
        assert plan.rides is not None
        assert plan.continued.tolist() == [False, stage == 0, stage == 0]
        lost = plan.continued & (plan.slots == 1)
        assert void.rows(plan.rides, none, lost).tolist() == [2]
    plan = reader.read(rig.step(riders=[replace(riders[1], stage=0, sample=False)]))
    assert plan.rides is not None
    assert void.rows(plan.rides, none, np.zeros(1, np.bool_)).tolist() == []
