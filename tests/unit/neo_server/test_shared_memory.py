from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neo_server.geometry import geometry_fields
from neo_server.launch import Options, resolve
from neo_server.shared_memory import SharedMemory


@pytest.fixture
def memory(tiny_model: Path) -> Iterator[SharedMemory]:
    resolved = resolve(Options(model=str(tiny_model), kv_offloading_size=0.001), lambda: False)
    made = SharedMemory(geometry_fields(resolved.config, resolved.model, 4), None)
    yield made
    made.close()


def test_the_row_of_a_child_is_not_that_of_a_stranger_with_its_pid(memory: SharedMemory) -> None:
    memory._control.take_row(0, 4242, 1, False)  # of another container
    assert memory.row_of(4242) is None
    memory._control.take_row(2, 4242, 1, True)
    assert memory.row_of(4242) == 2
    assert memory.row_of(0) is None


def test_a_worker_that_is_still_starting_is_no_worker_for_the_policy(memory: SharedMemory) -> None:
    memory._control.take_row(0, 4242, 1, True)
    assert [entry.pid for entry in memory.workers()] == [4242]
    assert memory.cpu_pool.live_workers() == 0
