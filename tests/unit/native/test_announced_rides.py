"""Riders in plans that a device moves: here ctypes views play the device's kernels."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import NONE, Rig, rig, wait_until
from tests.unit.native.waves import LAYERS, RIDES, TOKENS


class Device:
    """Publishes, waits and collects as kernels do, without ringing a bell."""

    def __init__(self, r: Rig) -> None:
        self.rig, self.at = r, nn.device_layout(r.geo)

    def word(self, name: str, offset: int = 0) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self.rig.segments.work.address + self.at[name] + offset)

    def publish(self, group: int, job: int, places: list[int], q: nn.Array) -> None:
        for place, row in zip(places, q, strict=True):
            at = self.at["ride_q"] + self.at["q_row_bytes"] * (
                group * self.rig.dim("ride_capacity") + place
            )
            ctypes.memmove(self.rig.segments.exchange.address + at, row.ctypes.data, row.nbytes)
        self.word("ride_published").value = job

    def wait(self, group: int, job: int) -> None:
        done = self.word("ride_done", group * self.at["ride_done_bytes"])
        wait_until(lambda: done.value >= job)

    def worker_of(self, group: int, task: int) -> tuple[int, int]:
        """Epoch of a task word, and the worker row that finished it."""
        word = self.word("ride_words", (group * self.at["ride_tasks"] + task) * 8).value
        return (
            word >> self.at["task_epoch_shift"],
            word >> self.at["task_worker_shift"] & self.at["task_field_mask"],
        )

    def first_output(self, group: int, task: int, n: int) -> nn.Array:
        """The first ``n`` floats of O of a task, divided by the sum of its first head."""
        geo, at = self.rig.geo, self.at
        _, worker = self.worker_of(group, task)
        begin = at["ride_areas"] + worker * at["worker_area_bytes"]
        begin += (group * at["ride_tasks"] + task) * at["area_bytes"]
        heads = int(geo["n_heads"]) // int(geo["n_kv_heads"])
        size = heads * (int(geo["head_dim"]) + 2)
        address = self.rig.segments.exchange.address + begin
        area = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
        return area[:n] / area[size - heads]


def test_a_device_moves_a_wave_through_announced_plans() -> None:
    """Each plan is announced while the one before is in flight, and retired when it is through."""
    with rig(TOKENS, spin_us=0, **RIDES) as r:
        worker = r.thread_worker(0, 2)
        worker.start()
        exchange, device = r.exchange(), Device(r)
        places, slots, lens = [0, 2], [0, 4], [300, 64]
        arrays = tuple(np.array(c, np.uint32) for c in (places, slots, lens))
        q = r.queries(2)
        for stage in range(LAYERS + 1):
            exchange.announce(stage, (NONE, NONE), (NONE, NONE), [(3, stage, *arrays)])
            [(collects, publishes, n_tasks, cut)] = exchange.announced_moves()
            assert (collects > 0) == (stage > 0)
            assert (publishes > 0) == (stage < LAYERS)
            if stage > 0:
                device.wait(3, collects)
                right = r.expected(stage - 1, q, np.array(slots), np.array(lens))
                for row in range(2):
                    assert cut[row, 1] == 1
                    task = int(cut[row, 0])
                    assert device.worker_of(3, task) == (collects, 0)
                    got = device.first_output(3, task, 64)
                    np.testing.assert_allclose(got, right[row, 0], atol=1e-5, rtol=0)
            if stage < LAYERS:
                assert n_tasks == 2 * r.dim("n_kv_heads")
                device.publish(3, publishes, places, q)
            exchange.retire(stage)  # at once: the job goes on
            if stage == 1:
                time.sleep(0.3)  # the pool is asleep when the next plan comes
        worker.stop()


def test_an_announced_plan_with_riders_holds_its_descriptor() -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        arrays = tuple(np.array([n], np.uint32) for n in (0, 0, 5))
        exchange.announce(0, (NONE, NONE), (NONE, NONE), [(0, 0, *arrays)])
        with pytest.raises(nn.NativeError, match="plan 4 is announced before plan 0 is retired"):
            exchange.announce(4, (NONE, NONE), (NONE, NONE))
        exchange.retire(0)
        exchange.announce(4, (NONE, NONE), (NONE, NONE))
