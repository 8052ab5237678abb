from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cpu_attn_worker.core_leases import lease_cores, running_on
from neo_native import Control, cores
from tests.unit.native.rig import rig


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """Of a machine with two nodes of four cores."""
    monkeypatch.setattr(cores, "usable", lambda *_: list(range(8)))
    monkeypatch.setattr(cores, "leasable", lambda reserved: list(range(8))[reserved:])
    monkeypatch.setattr(
        cores, "by_node", lambda some: [[c for c in some if c < 4], [c for c in some if c >= 4]]
    )
    with rig([1]) as r:
        yield r.control


def test_workers_begin_with_different_nodes(control: Control) -> None:
    assert lease_cores(control, 0, 2, 0) == [0, 1]
    assert lease_cores(control, 1, 2, 0) == [4, 5]
    assert lease_cores(control, 2, 2, 0) == [2, 3]


def test_a_node_that_has_enough_is_preferred_to_cores_of_two(control: Control) -> None:
    assert lease_cores(control, 0, 1, 0) == [0]
    assert lease_cores(control, 2, 4, 0) == [4, 5, 6, 7]


def test_cores_of_two_nodes_are_taken_when_none_has_enough(control: Control) -> None:
    assert lease_cores(control, 0, 6, 1) == [1, 2, 3, 4, 5, 6]


def test_reserved_cores_are_never_leased(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    assert lease_cores(control, 0, 7, 2) == []
    assert "6 of 7 threads found a free core (8 usable, 2 reserved); running unpinned" in (
        caplog.text
    )
    assert lease_cores(control, 1, 6, 2) == [2, 3, 4, 5, 6, 7]  # nothing was kept


def test_a_workers_cores_are_free_again_when_its_row_is_cleared(control: Control) -> None:
    assert len(lease_cores(control, 0, 8, 0)) == 8
    assert lease_cores(control, 1, 1, 0) == []
    control.clear_row(0)
    assert lease_cores(control, 1, 1, 0) == [4]


def test_the_mask_is_back_after_running_on_leased_cores() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    with running_on([first]):
        assert os.sched_getaffinity(0) == {first}
    with running_on([]):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
