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
from tests.unit.native.waves import LAYERS, RIDES, TOKENS, Wave, Waves


def fill_at_random(draw: random.Random, wave: Wave) -> None:
    slots = draw.sample(range(5), draw.randint(1, 3))
    places = sorted(draw.sample(range(3), len(slots)))
    wave.fill(places, slots, [draw.randint(1, TOKENS[s]) for s in slots])


def some_waves(draw: random.Random, waves: Waves, anew: float) -> list[Wave]:
    """Some groups, no two at the same stage; who is through, and now and then another, begins anew.

    ``anew``: how often a group that has a job gives it up for that.
    """
    chosen: dict[int, Wave] = {}
    for wave in waves.waves:
        if draw.random() < 0.3:
            continue
        if wave.stage == LAYERS or not wave.places or draw.random() < anew:
            waves.given_up += 0 <= wave.stage < LAYERS
            fill_at_random(draw, wave)
        elif len(wave.places) > 1 and wave.stage >= 0 and draw.random() < 0.2:
            wave.leave(draw.choice(wave.places))
        chosen.setdefault(wave.stage, wave)
    return list(chosen.values())


def run_at_random(waves: Waves, draw: random.Random, plans: int, anew: float = 0.05) -> None:
    """Also plans of a sub-batch alone in between, while all waves stand still."""
    for _ in range(plans):
        if chosen := some_waves(draw, waves, anew):
            waves.run(chosen)
        if draw.random() < 0.3:
            slots = draw.sample(range(5), draw.randint(1, 5))
            lens = [draw.randint(1, TOKENS[s]) for s in slots]
            Plan(waves.rig, slots, lens, waves.plan_id).run(waves.exchange, draw.randint(0, 1))
            waves.plan_id += 1


@pytest.mark.parametrize("spin_us", [0, 2000])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("anew", [0.0, 0.05])
def test_waves_at_random_give_the_reference(threads: int, spin_us: int, anew: float) -> None:
    with rig(TOKENS, spin_us=spin_us, **RIDES) as r:
        workers = [r.thread_worker(row, threads) for row in range(2)]
        for worker in workers:
            worker.start()
        waves = Waves(r, r.exchange())
        run_at_random(waves, random.Random(threads + spin_us), 150, anew)
        assert waves.checked > 300
        for worker in workers:
            worker.stop()
        rows = r.control.worker_rows()[:2]
        assert int(rows["stolen"].sum()) == 0
        # A thread inside a task of a job that is given up loses its claim; nothing else loses one.
        assert int(rows["lost"].sum()) <= waves.given_up * len(workers) * threads
        assert (waves.given_up > 0) == (anew > 0)


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
