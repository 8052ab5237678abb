"""Riders whose attention is given up, and riders that no plan may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_worker.errors import BadPlanError
from neo_native import RowKind, RowStatus
from tests.helpers.engine_rig import Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.unit.gpu_worker.riding import LAYERS, PROMPT, RIDES, TOLERANCE, checkpoint, ride

__all__ = ["checkpoint"]  # a fixture


def test_riders_that_do_not_follow_from_the_plans_before_are_a_bad_plan(checkpoint: Any) -> None:
    rig = Rig(checkpoint[0], workers=0, **RIDES)
    with pytest.raises(BadPlanError, match="plan 1: stage of group 0 is 2; it must be 0"):
        rig.run(riders=[ride(2, PROMPT, 0)])
    rig.run(riders=[ride(0, PROMPT, 5)])
    with pytest.raises(BadPlanError, match="slot 3 at place 0 of group 0 was not there"):
        rig.run(riders=[ride(1, PROMPT, 0, slot=3)])


@pytest.mark.parametrize("stuck_at", range(1, LAYERS + 1))
def test_what_is_given_up_is_void_until_it_begins_anew(checkpoint: Any, stuck_at: int) -> None:
    tokens, expected = checkpoint[1:]
    side = FakeCpuSide()
    rig = Rig(checkpoint[0], cpu_side=side, **RIDES)
    rig.run([Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT]) for s in (0, 1)])
    rig.run([Row(2, RowKind.PREFILL_GPU, 0, tokens[2][:PROMPT])])
    gpu = Row(2, RowKind.DECODE_GPU, PROMPT, [tokens[2][PROMPT]])
    for stage in range(LAYERS + 1):
        side.rides_stuck = stage == stuck_at
        outcome = rig.run([gpu], riders=[ride(stage, PROMPT, tokens[0][PROMPT])])
        torch.testing.assert_close(rig.logits[0][0], expected[2, PROMPT], atol=TOLERANCE, rtol=0)
        wanted = RowStatus.COMPUTED if stage < stuck_at else RowStatus.VOIDED
        assert outcome.status.tolist() == [RowStatus.SAMPLED, wanted]
        assert outcome.tokens[1] == -1
    side.rides_stuck = False
    # The token that a void row did not sample is not there for whoever counts on it.
    for stage in range(2):
        assert rig.run(riders=[ride(stage, PROMPT + 1, -1)]).status.tolist() == [RowStatus.VOIDED]
    for stage in range(LAYERS + 1):
        outcome = rig.run(riders=[ride(stage, PROMPT, tokens[0][PROMPT])])
    assert outcome.status.tolist() == [RowStatus.SAMPLED]
    torch.testing.assert_close(rig.logits[0][0], expected[0, PROMPT], atol=TOLERANCE, rtol=0)


def test_one_void_rider_of_a_group_leaves_the_other_alone(checkpoint: Any) -> None:
    tokens, expected = checkpoint[1:]
    rig = Rig(checkpoint[0], cpu_side=FakeCpuSide(), **RIDES)
    # Nothing is sampled, so there is no token for -1.
    rig.run([Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], False) for s in (0, 1)])
    for stage in range(LAYERS + 1):
        outcome = rig.run(
            riders=[
                ride(stage, PROMPT, -1),
                ride(stage, PROMPT, tokens[1][PROMPT], slot=1, place=1),
            ]
        )
        assert outcome.status[0] == RowStatus.VOIDED != outcome.status[1]
    torch.testing.assert_close(rig.logits[0][1], expected[1, PROMPT], atol=TOLERANCE, rtol=0)


def test_without_any_cpu_worker_riders_are_void_after_one_timeout(checkpoint: Any) -> None:
    tokens = checkpoint[1]
    rig = Rig(checkpoint[0], workers=0, timeout_s=0.3, **RIDES)
    rig.run([Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT]) for s in (0, 1)])
    first = [ride(0, PROMPT, tokens[0][PROMPT])]
    rig.run(riders=first)
    rig.run(riders=[ride(0, PROMPT, tokens[1][PROMPT], slot=1, place=2)])
    # Two groups cannot have one stage: the first goes on alone, and both are given up.
    outcome = rig.run(riders=[ride(1, PROMPT, 0)])
    assert outcome.status.tolist() == [RowStatus.VOIDED]
    assert outcome.times.ride_wait >= 0.3
    outcome = rig.run(
        riders=[ride(2, PROMPT, 0), ride(1, PROMPT, 0, slot=1, place=2)],
    )
    assert outcome.status.tolist() == [RowStatus.VOIDED] * 2
    assert outcome.times.ride_wait < 0.3
