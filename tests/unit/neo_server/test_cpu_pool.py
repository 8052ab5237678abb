from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from neo_native import worker_row_dtype
from neo_server.cpu_pool import CpuPool

STARTING, READY, DRAINING = 1, 2, 3


@dataclass
class Pool:
    """A worker table of ready rows and a clock, both moved by hand."""

    rows: int = 2
    now: float = 0.0
    table: Any = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.zeros(self.rows + 1, worker_row_dtype)  # the last row is empty
        self.table["state"][: self.rows] = READY
        self.table["pid"][: self.rows] = np.arange(self.rows) + 100
        self.table["n_threads"][: self.rows] = 3
        self.pool = CpuPool(lambda: self.table, lambda: self.now)


@pytest.mark.parametrize("state", [STARTING, DRAINING])
def test_only_workers_that_are_ready_count(state: int) -> None:
    pool = Pool()
    assert (pool.pool.live_workers(), pool.pool.live_threads()) == (2, 6)
    pool.table["state"][0] = state
    assert (pool.pool.live_workers(), pool.pool.live_threads()) == (1, 3)
    pool.table["draining"][1] = 1
    assert (pool.pool.live_workers(), pool.pool.live_threads()) == (0, 0)


@pytest.mark.parametrize(("column", "value"), [("tasks", 7), ("pid", 999)])
def test_after_a_void_there_are_no_workers_until_one_works_or_is_new(
    column: str, value: int
) -> None:
    pool = Pool()
    pool.pool.note_void()
    assert pool.pool.live_workers() == 0
    pool.now = 1e6
    assert pool.pool.live_workers() == 0
    pool.table[column][1] = value
    assert pool.pool.live_workers() == 2


def test_a_new_worker_with_the_id_of_the_old_one_counts() -> None:
    """Every container's first process is number 1."""
    pool = Pool()
    pool.table["pid"][:2] = 1
    pool.table["tasks"][:2] = 5
    pool.pool.note_void()
    assert pool.pool.live_workers() == 0
    pool.table["tasks"][0] = 0
    assert pool.pool.live_workers() == 2


def test_a_pool_that_wakes_up_is_tried_again_and_less_and_less_often() -> None:
    pool = Pool()
    for pause in (1.0, 2.0, 4.0):
        pool.pool.note_void()
        pool.table["heartbeat_ns"][0] += 1  # of the two workers, one still stands
        pool.now += 0.9 * pause
        assert pool.pool.live_workers() == 0
        pool.now += 0.2 * pause
        assert pool.pool.live_workers() == 1
    pool.table["tasks"][0] += 1
    assert pool.pool.live_workers() == 2
