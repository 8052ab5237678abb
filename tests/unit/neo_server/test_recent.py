"""What the scheduler remembers: gaps between plans on the device."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from neo_server.recent import Gaps

PLAN_S = 5e-3


def shares(gap_s: float, late_s: Callable[[int], float], plans: int = 400) -> float:
    """How often ``often`` holds where each plan begins ``gap_s`` behind the one before."""
    gaps, end, found = Gaps(), 0.0, 0
    for i in range(plans):
        end += gap_s + PLAN_S
        gaps.reported(end + late_s(i), PLAN_S)
        found += gaps.often and i >= plans // 2
    return 2 * found / plans


@pytest.mark.parametrize(("gap_s", "share"), [(0.0, 0.0), (5e-5, 0.0), (2e-4, 1.0), (2e-3, 1.0)])
def test_a_host_that_is_late_again_and_again_is_seen(gap_s: float, share: float) -> None:
    assert shares(gap_s, lambda _: 0.0) == share


def test_reports_that_come_sooner_or_later_are_no_gaps() -> None:
    draw = random.Random(0)
    assert shares(0.0, lambda _: draw.uniform(0.0, 3e-4)) < 0.02
    assert shares(0.0, lambda i: 1e-3 * (i % 5 == 0)) < 0.05
    assert shares(4e-4, lambda _: draw.uniform(0.0, 3e-4)) > 0.98


def test_a_single_gap_is_soon_forgotten() -> None:
    gaps = Gaps()
    for now in (1.0, 101.0, *(101.0 + i * PLAN_S for i in range(1, 41))):
        gaps.reported(now, PLAN_S)
    assert not gaps.often


def test_a_pause_is_no_gap() -> None:
    gaps = Gaps()
    for second in range(50):
        gaps.pause()
        gaps.reported(float(second), PLAN_S)
        gaps.reported(second + PLAN_S, PLAN_S)
    assert not gaps.often


def test_it_is_forgotten_when_the_host_is_in_time() -> None:
    gaps, now = Gaps(), 0.0
    for plan in range(250):
        now += PLAN_S + 1e-3 * (plan < 50)
        gaps.reported(now, PLAN_S)
        if plan == 49:
            assert gaps.often
    assert not gaps.often
