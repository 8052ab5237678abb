"""What the scheduler remembers: gaps between plans on the device."""

from __future__ import annotations

import pytest

from neo_server.recent import Gaps


def reports(gap_s: float, plans: int, has_work: bool = True) -> Gaps:
    gaps, now = Gaps(), 0.0
    for _ in range(plans):
        now += gap_s + 5e-3
        gaps.reported(now, 5e-3, has_work)
    return gaps


@pytest.mark.parametrize(
    ("gap_s", "often"), [(0.0, False), (5e-5, False), (2e-4, True), (2e-3, True)]
)
def test_a_host_that_is_late_again_and_again_is_seen(gap_s: float, often: bool) -> None:
    assert reports(gap_s, 20).often is often


def test_a_single_gap_is_no_sign() -> None:
    assert not reports(1.0, 2).often


def test_a_pause_without_work_is_no_gap() -> None:
    assert not reports(1.0, 50, has_work=False).often


def test_it_is_forgotten_when_the_host_is_in_time() -> None:
    gaps, now = reports(1e-3, 50), 1.0
    assert gaps.often
    for _ in range(150):
        now += 5e-3
        gaps.reported(now, 5e-3, True)
    assert not gaps.often
