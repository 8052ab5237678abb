"""Riders against transformers: whoever joins, leaves, or stands still."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.executor import Outcome
from neo_native import Feature, RowKind, RowStatus, SwapKind, WireDType
from protos.config import DType
from tests.helpers.engine_rig import Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.unit.gpu_worker.riding import (
    LAYERS,
    PLACES,
    PROMPT,
    RIDES,
    TOLERANCE,
    checkpoint,
    ride,
)

__all__ = ["checkpoint"]  # a fixture


@pytest.fixture(params=["fake", "native"])
def rig(request: pytest.FixtureRequest, checkpoint: Any) -> Iterator[Rig]:
    if request.param == "fake":
        made = Rig(checkpoint[0], cpu_side=FakeCpuSide(), **RIDES)
    else:
        made = Rig(checkpoint[0], workers=2, **RIDES)
    yield made
    made.close()


@dataclass
class Rider:
    """A sequence that rides: its tokens are given, so each can be checked by itself."""

    slot: int
    place: int
    start: int
    stage: int = 0

    def row(self, token: int) -> Row:
        """Of the next plan that moves its group."""
        last = self.stage == LAYERS
        return Row(self.slot, RowKind.RIDE_CPU, self.start, [token], last, self.stage, self.place)


class Wave:
    """Some riders of one rig, with rows of the reference for each."""

    def __init__(self, rig: Rig, checkpoint: Any) -> None:
        self.rig, self.checkpoint = rig, checkpoint
        self.riders: list[Rider] = []
        self.sampled = 0

    def join(self, slot: int, place: int, start: int) -> Rider:
        """Its cache holds ``start`` tokens."""
        rider = Rider(slot, place, start)
        self.riders.append(rider)
        return rider

    def run(
        self, *batches: list[Row], riders: list[Rider] | None = None, **changes: Any
    ) -> Outcome:
        """One plan with all riders, or those named; checks statuses and logits of every row."""
        tokens, expected = self.checkpoint[1:]
        moved = sorted(self.riders if riders is None else riders, key=lambda r: r.place)
        rows = [rider.row(tokens[rider.slot][rider.start]) for rider in moved]
        outcome = self.rig.run(*batches, riders=rows, **changes)
        rows = [row for batch in batches for row in batch] + rows
        sampled = [row for row in rows if row.sample]
        for logits, row in zip(self.rig.logits[0] if sampled else (), sampled, strict=True):
            right = expected[row.slot, row.start + len(row.tokens) - 1]
            torch.testing.assert_close(logits, right, atol=TOLERANCE, rtol=0)
        wanted = [RowStatus.SAMPLED if row.sample else RowStatus.COMPUTED for row in rows]
        assert outcome.status.tolist() == wanted
        assert outcome.slots.tolist() == [row.slot for row in rows]
        for rider in moved:
            self.sampled += rider.stage == LAYERS
            rider.start += rider.stage == LAYERS
            rider.stage = (rider.stage + 1) % (LAYERS + 1)
        return outcome


def prefill(rig: Rig, tokens: Any, slots: range, kind: RowKind = RowKind.PREFILL_CPU) -> None:
    rig.run([Row(s, kind, 0, tokens[s][:PROMPT], sample=False) for s in slots])


def test_a_full_pipeline_of_waves_beside_gpu_rows_equals_transformers(
    rig: Rig, checkpoint: Any
) -> None:
    tokens = checkpoint[1]
    prefill(rig, tokens, range(6))
    prefill(rig, tokens, range(6, 8), RowKind.PREFILL_GPU)
    wave = Wave(rig, checkpoint)
    for plan in range(14):
        if plan < 3:  # a group a plan, so that they are staggered
            wave.join(2 * plan, plan * PLACES, PROMPT)
            wave.join(2 * plan + 1, plan * PLACES + 1, PROMPT)
        at = PROMPT + plan
        gpu = [Row(s, RowKind.DECODE_GPU, at, [tokens[s][at]]) for s in (6, 7)]
        wave.run(gpu)
    assert wave.sampled == 2 * (3 + 3 + 3)


def test_riders_alone_ride(rig: Rig, checkpoint: Any) -> None:
    prefill(rig, checkpoint[1], range(3))
    wave = Wave(rig, checkpoint)
    wave.join(0, 1, PROMPT)
    wave.run()
    wave.join(1, 6, PROMPT)
    wave.join(2, 7, PROMPT)
    for _ in range(8):
        wave.run()
    assert wave.sampled == 2 + 2 * 2


def test_waves_stand_still_while_plans_of_other_kinds_run(rig: Rig, checkpoint: Any) -> None:
    tokens = checkpoint[1]
    prefill(rig, tokens, range(5))
    prefill(rig, tokens, range(5, 6), RowKind.PREFILL_GPU)
    wave = Wave(rig, checkpoint)
    first, second = wave.join(0, 0, PROMPT), wave.join(1, 1, PROMPT)
    wave.run()
    late = wave.join(2, 3, PROMPT)
    for plan in range(8):
        at = PROMPT + plan
        batches = [
            [
                Row(5, RowKind.DECODE_GPU, at, [tokens[5][at]]),
                Row(3, RowKind.DECODE_CPU, at, [tokens[3][at]]),
            ],
            [Row(4, RowKind.DECODE_CPU, at, [tokens[4][at]])],
        ]
        wave.run(*batches, riders=[])  # all stand still
        wave.run(riders=[first, second] if plan % 2 else [late])  # some do
    assert wave.sampled == 2 + 1
    both = [Row(4, RowKind.DECODE_CPU, PROMPT + 8, [tokens[4][PROMPT + 8]])]
    for _ in range(LAYERS + 1):  # riders with two sub-batches
        wave.run([Row(6, RowKind.PREFILL_GPU, 0, tokens[6][:40])], both)


def test_riders_leave_and_others_take_their_places(rig: Rig, checkpoint: Any) -> None:
    """Aborted in mid-wave, one or all of a group, with prefills beside them."""
    tokens = checkpoint[1]
    prefill(rig, tokens, range(6))
    wave = Wave(rig, checkpoint)
    stays, leaves = wave.join(0, 0, PROMPT), wave.join(1, 1, PROMPT)
    gone = wave.join(2, 4, PROMPT)
    wave.run(riders=[stays, leaves])
    wave.run([Row(6, RowKind.PREFILL_CPU, 0, tokens[6][:30])])
    wave.riders = [stays]
    wave.run()
    for _ in range(LAYERS - 2):
        wave.run()
    wave.join(3, 1, PROMPT)  # at stage 0, with the one that stayed
    wave.riders[-1].stage = gone.stage = 0
    wave.run()
    wave.join(4, 4, PROMPT)  # instead of the group that vanished whole
    for _ in range(2 * (LAYERS + 1)):
        wave.run([Row(7, RowKind.PREFILL_GPU, 0, tokens[7][:9])])
    assert wave.sampled >= 1 + 2 + 2 + 1


def test_a_sequence_rides_decodes_moves_and_rides_again(rig: Rig, checkpoint: Any) -> None:
    tokens = checkpoint[1]
    prefill(rig, tokens, range(1))
    wave = Wave(rig, checkpoint)
    rider = wave.join(0, 3, PROMPT)
    for _ in range(LAYERS + 1):
        wave.run()
    for kind, swaps in (
        (RowKind.DECODE_CPU, []),
        (RowKind.DECODE_GPU, [(0, SwapKind.IN, PROMPT + 2)]),
        (RowKind.DECODE_CPU, [(0, SwapKind.OUT, PROMPT + 3)]),
    ):
        row = Row(0, kind, rider.start, [tokens[0][rider.start]])
        wave.run([row], riders=[], swaps=swaps)
        rider.start += 1
    for _ in range(LAYERS):
        wave.run()
    # Swapped in and decoded in mid-wave: it begins that token anew.
    at = rider.start
    wave.run(
        [Row(0, RowKind.DECODE_GPU, at, [tokens[0][at]])],
        riders=[],
        swaps=[(0, SwapKind.IN, at)],
    )
    wave.run([], riders=[], swaps=[(0, SwapKind.OUT, at + 1)])
    rider.start, rider.stage, rider.place = at + 1, 0, 5
    for _ in range(LAYERS + 1):
        wave.run()
    assert wave.sampled == 2


def greedy_tokens(rig: Rig, tokens: Any, count: int) -> list[list[int]]:
    """Of two CPU-requests, decoded as usual."""
    rig.run([Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], sample=False) for s in (0, 1)])
    last = [tokens[s][PROMPT] for s in (0, 1)]
    found: list[list[int]] = [[], []]
    for i in range(count):
        rows = [Row(s, RowKind.DECODE_CPU, PROMPT + i, [last[s]]) for s in (0, 1)]
        last = rig.run(rows).tokens.tolist()
        for s in (0, 1):
            found[s].append(last[s])
    return found


@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.5)])
def test_tokens_planned_ahead_equal_those_of_ordinary_decodes(
    checkpoint: Any, temperature: float, penalty: float
) -> None:
    """A rider's next token is -1: what its row of a plan before sampled. From and to decodes.

    With a penalty the tokens so far decide: riders' count too.
    """
    tokens = checkpoint[1]
    rigs = [Rig(checkpoint[0], workers=1, **RIDES) for _ in range(2)]
    for made in rigs:
        made.sequences.params["temperature"] = temperature
        made.sequences.params["seed"] = np.arange(8) + 5
        if penalty:
            made.sequences.params["features"] = Feature.PENALTIES
            made.sequences.params["frequency_penalty"] = penalty
            made.sequences.params["repetition_penalty"] = 1.5
            made.sequences.params["n_prompt"] = PROMPT
    wanted = greedy_tokens(rigs[0], tokens, 8)
    rig = rigs[1]
    rig.run([Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], sample=False) for s in (0, 1)])
    token = {0: tokens[0][PROMPT], 1: tokens[1][PROMPT]}
    found: list[list[int]] = [[], []]
    for i in range(8):
        at = PROMPT + i
        if i in (3, 4):  # ordinary decodes in between, planned ahead too
            out = rig.run([Row(s, RowKind.DECODE_CPU, at, [token[s]]) for s in (0, 1)])
        else:
            for stage in range(LAYERS + 1):
                out = rig.run(
                    riders=[
                        Row(s, RowKind.RIDE_CPU, at, [token[s]], stage == LAYERS, stage, s)
                        for s in (0, 1)
                    ]
                )
        for s in (0, 1):
            found[s].append(int(out.tokens[s]))
            token[s] = -1
    assert found == wanted
    for made in rigs:
        made.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.FLOAT16, 0.03), (DType.BFLOAT16, 0.25)])
def test_half_precision_rides(checkpoint: Any, dtype: DType, tolerance: float) -> None:
    tokens, expected = checkpoint[1:]
    rig = Rig(checkpoint[0], workers=1, dtype=dtype, **RIDES)
    rig.run([Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT])])
    for position in range(PROMPT, PROMPT + 2):
        for stage in range(LAYERS + 1):
            rig.run(riders=[ride(stage, position, tokens[0][position])])
        torch.testing.assert_close(rig.logits[0][0], expected[0, position], atol=tolerance, rtol=0)
    rig.close()


def test_riders_of_an_int8_cache_equal_decodes_of_an_int8_cache(checkpoint: Any) -> None:
    """The same keys and values, quantised once each, in whatever plan."""
    tokens = checkpoint[1]
    logits = []
    for riding in (False, True):
        rig = Rig(checkpoint[0], workers=1, kv_dtype=WireDType.INT8, **RIDES)
        rig.run([Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT])])
        for position in range(PROMPT, PROMPT + 2):
            token = tokens[0][position]
            if not riding:
                rig.run([Row(0, RowKind.DECODE_CPU, position, [token])])
            for stage in range(LAYERS + 1) if riding else ():
                rig.run(riders=[ride(stage, position, token)])
        logits.append(rig.logits[0][0].clone())
        rig.close()
    torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=0)
