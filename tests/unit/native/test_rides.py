"""Jobs of riders: attention that outlives the plan which published it."""

from __future__ import annotations

import ctypes
import random
import signal
import time

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import (
    BF16,
    F16,
    F32,
    NONE,
    SHORT_LEASE_US,
    Plan,
    Rig,
    is_stopped,
    resume,
    rig,
    wait_until,
)
from tests.unit.native.waves import Wave, Waves

TOKENS = [300, 17, 700, 1, 64]
LAYERS = 3
RIDES = {"n_layers": LAYERS, "ride_groups": LAYERS + 1, "ride_capacity": 3, "max_rows": 16}


def fill_at_random(draw: random.Random, wave: Wave) -> None:
    slots = draw.sample(range(5), draw.randint(1, 3))
    places = sorted(draw.sample(range(3), len(slots)))
    wave.fill(places, slots, [draw.randint(1, TOKENS[s]) for s in slots])


def some_waves(draw: random.Random, waves: Waves) -> list[Wave]:
    """Some groups, no two at the same stage; who is through or lost all riders begins anew."""
    chosen: dict[int, Wave] = {}
    for wave in waves.waves:
        if draw.random() < 0.3:
            continue
        if wave.stage == LAYERS or not wave.places or draw.random() < 0.05:
            fill_at_random(draw, wave)
        elif len(wave.places) > 1 and wave.stage >= 0 and draw.random() < 0.2:
            wave.leave(draw.choice(wave.places))
        chosen.setdefault(wave.stage, wave)
    return list(chosen.values())


def run_at_random(waves: Waves, draw: random.Random, plans: int) -> None:
    """Also plans of a sub-batch alone in between, while all waves stand still."""
    for _ in range(plans):
        if chosen := some_waves(draw, waves):
            waves.run(chosen)
        if draw.random() < 0.3:
            slots = draw.sample(range(5), draw.randint(1, 5))
            lens = [draw.randint(1, TOKENS[s]) for s in slots]
            Plan(waves.rig, slots, lens, waves.plan_id).run(waves.exchange, draw.randint(0, 1))
            waves.plan_id += 1


@pytest.mark.parametrize("spin_us", [0, 2000])
@pytest.mark.parametrize("threads", [1, 3])
def test_waves_at_random_give_the_reference(threads: int, spin_us: int) -> None:
    with rig(TOKENS, spin_us=spin_us, **RIDES) as r:
        workers = [r.thread_worker(row, threads) for row in range(2)]
        for worker in workers:
            worker.start()
        waves = Waves(r, r.exchange())
        run_at_random(waves, random.Random(threads + spin_us), 150)
        assert waves.checked > 300
        for worker in workers:
            worker.stop()
        # A claim is lost when its group begins anew before the task is finished, never by theft.
        assert int(r.control.worker_rows()[:2]["stolen"].sum()) == 0


@pytest.mark.parametrize(("act", "kv"), [(F16, F16), (BF16, BF16), (F32, BF16)])
def test_sixteen_bit_types_ride(act: int, kv: int) -> None:
    with rig([90, 33], act_dtype=act, kv_dtype=kv, head_dim=80, **RIDES) as r:
        worker = r.thread_worker(0)
        worker.start()
        waves = Waves(r, r.exchange())
        waves.waves[2].fill([0, 2], [0, 1], [90, 33])
        for _ in range(LAYERS + 1):
            waves.run([waves.waves[2]])
        assert waves.checked == 2 * LAYERS
        worker.stop()


def test_jobs_are_finished_while_no_plan_is_in_flight_and_then_the_pool_sleeps() -> None:
    with rig(TOKENS, spin_us=2000, **RIDES) as r:
        exchange = r.exchange()
        waves = Waves(r, exchange)
        first, second = waves.waves[:2]
        first.fill([0], [2], [700])
        second.fill([0, 1], [0, 1], [300, 17])
        waves.run([first])
        waves.run([second])
        worker = r.thread_worker(0)
        worker.start()
        wait_until(lambda: all(done_number(r, group) for group in (0, 1)))
        time.sleep(0.05)  # beyond spin_us
        spent = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - spent < 0.1  # nobody spins
        for _ in range(LAYERS):
            waves.run([first])
            waves.run([second])
        assert waves.checked == LAYERS * 3
        worker.stop()


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_jobs_are_done_in_the_order_in_which_they_are_needed(jobs: int) -> None:
    with rig(TOKENS, **RIDES) as r:
        waves = Waves(r, r.exchange())
        order = [3, 1, 2, 0]
        for group in order:
            waves.waves[group].fill([0, 1], [0, 2], [300, 17])
            waves.run([waves.waves[group]])
        tasks = 2 * r.dim("n_kv_heads")
        worker = r.spawn(f"finished=stop@{jobs * tasks + 1}")
        wait_until(lambda: is_stopped(worker.pid))
        assert [group for group in order if done_number(r, group)] == order[:jobs]


def done_number(r: Rig, group: int) -> int:
    """Of the group's last job that is done, read where a device would; 0: none."""
    at = nn.device_layout(r.geo)
    address = r.segments.work.address + at["ride_done"] + group * at["ride_done_bytes"]
    return ctypes.c_uint64.from_address(address).value


def test_riders_that_left_are_not_collected_and_a_group_that_lost_all_begins_anew() -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        waves = Waves(r, exchange)
        wave = waves.waves[1]
        wave.fill([0, 1, 2], [0, 1, 2], [300, 17, 700])
        waves.run([wave])
        wave.fill([1], [4], [64])  # all of them left: their job is nobody's any more
        waves.run([wave])
        worker = r.thread_worker(0, 2)
        worker.start()
        wave.places, wave.slots, wave.lens = [1], [4], [64]
        for _ in range(LAYERS):
            waves.run([wave])
        wave.fill([0, 1, 2], [0, 1, 2], [300, 17, 700])
        waves.run([wave])
        wave.leave(0)
        waves.run([wave])
        wave.leave(2)
        waves.run([wave])
        assert waves.checked == LAYERS + 2 + 1
        worker.stop()


def test_what_is_given_up_ends_the_wait_and_the_group_begins_anew() -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        waves = Waves(r, exchange)
        wave, other = waves.waves[:2]
        wave.fill([0], [0], [300])
        waves.run([wave])
        exchange.begin_plan(7, (NONE, NONE), (NONE, NONE), [wave.move()])
        assert not exchange.ride_wait(0, 0.02)
        with pytest.raises(nn.NativeError, match="not done"):
            exchange.ride_collect(0, r.queries(1))
        exchange.ride_give_up()
        assert not exchange.ride_wait(0, 60.0)
        exchange.ride_publish(0, r.queries(1))  # published all the same; void
        exchange.end_plan()
        worker = r.thread_worker(0)
        worker.start()
        waves.plan_id = 8
        wave.fill([2], [1], [17])
        other.fill([0], [3], [1])
        waves.run([wave])
        for _ in range(LAYERS):
            waves.run([wave, other] if wave.stage != other.stage else [wave])
        assert waves.checked > LAYERS
        worker.stop()


def test_a_new_gpu_worker_gives_up_the_waves_of_its_predecessor() -> None:
    with rig(TOKENS, **RIDES) as r:
        dead = r.exchange()
        before = Waves(r, dead)
        for group in range(3):
            before.waves[group].fill([0], [group], [TOKENS[group]])
            before.run([before.waves[group]])
        dead.begin_plan(9, (NONE, NONE), (NONE, NONE), [  # announced, never published
            (3, 0, *(np.array([n], np.uint32) for n in (0, 3, 1)))
        ])  # fmt: skip
        successor = r.exchange()
        worker = r.thread_worker(0)
        worker.start()
        waves = Waves(r, successor)
        run_at_random(waves, random.Random(5), 30)
        assert waves.checked > 30
        worker.stop()
        dead.end_plan()


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


def column(*values: int) -> nn.Array:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(4, 0, column(0), column(0), column(5))], "group is 4 with 1 riders; there are 4"),
        ([(0, 0, column(), column(), column())], "group is 0 with 0 riders"),
        ([(0, 1, column(0), column(0), column(5))], "stage of group 0 is 1; it must be 0"),
        ([(1, 2, column(0), column(0), column(5))], "stage of group 1 is 2; it must be 0 or 1"),
        ([(1, 1, column(1), column(0), column(5))], "slot 0 at place 1 of group 1 was not there"),
        ([(1, 1, column(0), column(1), column(5))], "slot 1 at place 0 of group 1 was not there"),
        ([(1, 1, column(0), column(0), column(6))], "slot 0 at place 0 of group 1 was not there"),
        ([(0, 0, column(3), column(0), column(5))], "place is 3; places must grow"),
        ([(0, 0, column(1, 1), column(0, 2), column(5, 5))], "place is 1; places must grow"),
        ([(0, 0, column(0), column(8), column(5))], "slot is 8; it must be below max_slots"),
        ([(0, 0, column(0), column(0), column(0))], "seq_len is 0; it must be from 1"),
        (
            [(0, 0, column(0), column(0), column(5)), (2, 0, column(0), column(2), column(5))],
            "stages must grow",
        ),
    ],
)  # fmt: skip
def test_moves_that_break_the_rules_are_refused(
    moves: list[tuple[int, int, nn.Array, nn.Array, nn.Array]], message: str
) -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        exchange.begin_plan(
            0, (NONE, NONE), (NONE, NONE), [(1, 0, column(0), column(0), column(5))]
        )
        exchange.ride_publish(1, r.queries(1))
        exchange.end_plan()
        with pytest.raises((ValueError, IndexError), match=message):
            exchange.begin_plan(1, (NONE, NONE), (NONE, NONE), moves)
        exchange.begin_plan(1, (NONE, NONE), (NONE, NONE))  # nothing was begun
        exchange.end_plan()


def test_calls_out_of_order_are_refused() -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        exchange.begin_plan(
            0, (NONE, NONE), (NONE, NONE), [(1, 0, column(0), column(0), column(5))]
        )
        with pytest.raises(nn.NativeError, match="group 0 has no riders"):
            exchange.ride_publish(0, r.queries(1))
        with pytest.raises(nn.NativeError, match="wait without a published job"):
            exchange.ride_wait(1, 0.0)
        exchange.ride_publish(1, r.queries(1))
        with pytest.raises(nn.NativeError, match="publishes twice"):
            exchange.ride_publish(1, r.queries(1))
        exchange.end_plan()


def test_without_groups_there_are_no_moves() -> None:
    with rig(TOKENS) as r, pytest.raises(ValueError, match="there are 0 groups"):
        r.exchange().begin_plan(
            0, (NONE, NONE), (NONE, NONE), [(0, 0, column(0), column(0), column(5))]
        )


POINTS = ["claimed", "computing", "written", "finished"]


@pytest.mark.parametrize("point", POINTS)
def test_what_a_killed_worker_had_claimed_of_a_wave_is_done_by_another(point: str) -> None:
    draw = random.Random(point)
    with rig(TOKENS, lease_us=SHORT_LEASE_US, **RIDES) as r:
        victim = r.spawn(f"{point}=kill@{draw.randint(1, 12)}", threads=2)
        r.wait_for_workers(1)
        r.spawn()
        r.wait_for_workers(2)
        waves = Waves(r, r.exchange())
        while victim.poll() is None:
            run_at_random(waves, draw, 3)
            assert waves.plan_id < 4000, "the fault never fired"
        assert victim.returncode == -signal.SIGKILL
        run_at_random(waves, draw, 10)


@pytest.mark.parametrize("point", POINTS)
def test_a_stopped_worker_that_wakes_late_reaches_no_wave(point: str) -> None:
    draw = random.Random(point + "!")
    with rig(TOKENS, lease_us=SHORT_LEASE_US, **RIDES) as r:
        victim = r.spawn(f"{point}=stop@{draw.randint(1, 12)}", threads=2)
        r.wait_for_workers(1)
        r.spawn()
        r.wait_for_workers(2)
        waves = Waves(r, r.exchange())
        while not is_stopped(victim.pid):
            run_at_random(waves, draw, 2)
            assert waves.plan_id < 4000, "the fault never fired"
        run_at_random(waves, draw, 10)
        resume(victim)
        run_at_random(waves, draw, 20)
        assert victim.poll() is None
        r.control.set_stopping()
        assert victim.wait(30) == 0
