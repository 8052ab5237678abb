from __future__ import annotations

import pytest

from neo_server.core_plan import CorePlan, plan_cores


@pytest.mark.parametrize(
    ("n_cores", "workers", "is_cuda", "expected"),
    [
        (16, 1, True, CorePlan(14, 2, True, 0)),
        (16, 2, True, CorePlan(7, 2, True, 0)),
        (16, 4, True, CorePlan(3, 2, True, 0)),
        (2, 2, True, CorePlan(1, 0, True, 0)),
        (1, 2, True, CorePlan(1, 0, False, 0)),
        (16, 0, True, CorePlan(14, 2, True, 0)),
        (2, 2, False, CorePlan(1, 0, False, 1)),
        (2, 1, False, CorePlan(1, 1, True, 1)),
        (16, 2, False, CorePlan(4, 8, True, 8)),
        (1, 1, False, CorePlan(1, 0, False, 1)),
    ],
)
def test_cores_are_divided_by_default(
    n_cores: int, workers: int, is_cuda: bool, expected: CorePlan
) -> None:
    assert plan_cores(n_cores, workers, None, None, is_cuda=is_cuda) == expected


@pytest.mark.parametrize(
    ("threads", "reserved", "expected"),
    [
        (4, None, CorePlan(4, 2, True, 0)),
        (7, None, CorePlan(7, 2, True, 0)),
        (8, None, CorePlan(8, 2, False, 0)),
        (8, 0, CorePlan(8, 0, True, 0)),
        (None, 6, CorePlan(5, 6, True, 0)),
        (None, 20, CorePlan(1, 20, False, 0)),
    ],
)
def test_what_is_given_is_taken_and_threads_are_pinned_only_where_all_fit(
    threads: int | None, reserved: int | None, expected: CorePlan
) -> None:
    assert plan_cores(16, 2, threads, reserved, is_cuda=True) == expected
