from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from neo_native import Exchange, segments
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


def test_cpu_workers_do_not_spin_for_the_plans_of_a_dead_gpu_worker(memory: SharedMemory) -> None:
    mapped = memory._segments
    exchange = Exchange(memory._control, mapped.work, mapped.exchange, mapped.geometry)
    none, one = np.empty(0, np.uint32), np.ones(1, np.uint32)
    exchange.announce(1, (one, none), (one, none))
    assert memory._control.plans == (1, 1)
    gpu_worker = segments.gpu_worker_byte(0)
    assert mapped.try_lock(gpu_worker)
    memory.clear_plans()
    assert memory._control.plans == (1, 1)  # it lives, and will count down itself
    segments.unlock(mapped.fd, gpu_worker)
    memory.clear_plans()
    assert memory._control.plans == (0, 0)
