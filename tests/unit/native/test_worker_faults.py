"""Workers that die or stop at every point of a task, while jobs go on."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest

from tests.unit.native.rig import (
    F32,
    NONE,
    SHORT_LEASE_US,
    Plan,
    Rig,
    is_stopped,
    resume,
    rig,
    tolerance,
    wait_until,
)

POINTS = ["claimed", "computing", "written", "finished"]
TOKENS = [300, 17, 700, 1, 64]


def random_plans(r: Rig, seed: int, n: int, first_id: int = 0) -> list[Plan]:
    draw = random.Random(seed)
    plans = []
    for i in range(n):
        slots = draw.sample(range(5), draw.randint(1, 5))
        lens = [draw.randint(1, TOKENS[s]) for s in slots]
        plans.append(Plan(r, slots, lens, first_id + i))
    return plans


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("point", POINTS)
def test_what_a_killed_worker_had_claimed_is_done_by_another(point: str, seed: int) -> None:
    nth = random.Random(seed).randint(1, 12)
    with rig(TOKENS, seed, lease_us=SHORT_LEASE_US) as r:
        victim = r.spawn(f"{point}=kill@{nth}", threads=2)
        r.wait_for_workers(1)
        r.spawn()
        r.wait_for_workers(2)
        exchange = r.exchange()
        number = 0
        while victim.poll() is None:
            for plan in random_plans(r, seed + number, 4, number):
                plan.run(exchange)
            number += 4
            assert number < 4000, "the fault never fired"
        assert victim.returncode == -signal.SIGKILL
        for plan in random_plans(r, seed + 99, 3, number):
            plan.run(exchange)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("point", POINTS)
def test_a_stopped_worker_that_wakes_late_reaches_nobody(point: str, seed: int) -> None:
    """Woken while later jobs run, at a random one; every row of every job is checked."""
    draw = random.Random(seed * 7 + 1)
    with rig(TOKENS, seed, lease_us=SHORT_LEASE_US) as r:
        victim = r.spawn(f"{point}=stop@{draw.randint(1, 12)}", threads=2)
        r.wait_for_workers(1)
        r.spawn()
        r.wait_for_workers(2)
        exchange = r.exchange()
        number = 0
        while not is_stopped(victim.pid):
            random_plans(r, draw.randint(0, 999), 1, number)[0].run(exchange, number % 2)
            number += 1
            assert number < 4000, "the fault never fired"
        for _ in range(draw.randint(1, 4)):
            random_plans(r, draw.randint(0, 999), 1, number)[0].run(exchange, number % 2)
            number += 1
        resume(victim)
        for _ in range(10):
            random_plans(r, draw.randint(0, 999), 1, number)[0].run(exchange, number % 2)
            number += 1
        assert victim.poll() is None
        r.control.set_stopping()
        assert victim.wait(30) == 0


@pytest.mark.parametrize("jobs_between", [0, 1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_wake_up_between_done_and_collect_changes_no_result(
    point: str, jobs_between: int
) -> None:
    """The worst moment: every word is finished and none is read yet."""
    with rig(TOKENS, n_layers=6, lease_us=SHORT_LEASE_US) as r:
        victim = r.spawn(f"{point}=stop@1")
        r.wait_for_workers(1)
        exchange = r.exchange()
        slots, lens = np.arange(5, dtype=np.uint32), np.array(TOKENS, np.uint32)
        exchange.begin_plan(0, (slots, NONE), (lens, NONE))
        for layer in range(jobs_between + 1):
            q = r.queries(5)
            exchange.publish(0, layer, q)
            if layer == 0:
                wait_until(lambda: is_stopped(victim.pid))
                r.spawn()
            assert exchange.wait(0, 60.0)
        resume(victim)
        beat = int(r.control.worker_rows()["heartbeat_ns"][0])
        if point != "finished":
            wait_until(lambda: int(r.control.worker_rows()["lost"][0]) == 1)
        else:
            wait_until(lambda: int(r.control.worker_rows()["heartbeat_ns"][0]) > beat)
        out = np.zeros_like(q)
        exchange.collect(0, out)
        np.testing.assert_allclose(
            out, r.expected(layer, q, slots, lens), atol=tolerance(F32), rtol=0
        )
        exchange.end_plan()


def test_a_job_is_done_when_its_last_task_is_whatever_else_waits() -> None:
    """Not when the thread that finished it has been through the other sub-batch's tasks too."""
    with rig(TOKENS, lease_us=SHORT_LEASE_US) as r:
        exchange, q = r.exchange(), r.queries(4)
        slots, lens = np.arange(4, dtype=np.uint32), np.array(TOKENS[:4], np.uint32)
        exchange.begin_plan(0, (slots, slots), (lens, lens))
        for channel in range(2):
            exchange.publish(channel, 0, q)
        worker = r.spawn(f"claimed=stop@{exchange.n_tasks(0) + 1}")
        wait_until(lambda: is_stopped(worker.pid))
        assert [exchange.done_epoch(channel) > 0 for channel in range(2)] == [True, False]
        resume(worker)
        assert exchange.wait(1, 60.0)
        exchange.end_plan()


def test_a_stopped_worker_keeps_its_row_and_a_killed_one_leaves_it_to_the_next() -> None:
    with rig(TOKENS, lease_us=SHORT_LEASE_US) as r:
        first = r.spawn()
        r.wait_for_workers(1)
        first.send_signal(signal.SIGSTOP)
        second = r.spawn()
        r.wait_for_workers(2)
        assert r.control.worker_rows()["pid"][:2].tolist() == [first.pid, second.pid]
        first.kill()
        first.wait()
        third = r.spawn()
        wait_until(lambda: int(r.control.worker_rows()["pid"][0]) == third.pid)
        Plan(r, [0, 2], [300, 700]).run(r.exchange())


@pytest.mark.parametrize("point", POINTS)
def test_when_all_workers_die_in_mid_job_the_next_one_finishes_it(point: str) -> None:
    """The successor gets the very row, thread number and so the claims of the dead."""
    with rig(TOKENS, lease_us=SHORT_LEASE_US) as r:
        victim = r.spawn(f"{point}=kill@2")
        r.wait_for_workers(1)
        exchange = r.exchange()
        slots, lens = np.arange(5, dtype=np.uint32), np.array(TOKENS, np.uint32)
        exchange.begin_plan(0, (slots, NONE), (lens, NONE))
        q = r.queries(5)
        exchange.publish(0, 0, q)
        assert victim.wait(30) == -signal.SIGKILL
        assert not exchange.wait(0, 0.05)
        r.spawn()
        assert exchange.wait(0, 60.0)
        out = np.zeros_like(q)
        exchange.collect(0, out)
        np.testing.assert_allclose(out, r.expected(0, q, slots, lens), atol=tolerance(F32), rtol=0)
        exchange.end_plan()


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_under_random_kills_stops_and_joins_answers_every_job_right(seed: int) -> None:
    draw = random.Random(seed)
    with rig(TOKENS, seed, lease_us=3000) as r:
        pool = [r.spawn(threads=2) for _ in range(3)]
        r.wait_for_workers(3)
        exchange = r.exchange()
        for number in range(60):
            random_plans(r, draw.randint(0, 9999), 1, number)[0].run(exchange, number % 2)
            victim = draw.choice(pool)
            action = draw.choice(["none", "stop", "continue", "kill"])
            if action == "stop" and sum(not is_stopped(p.pid) for p in pool) > 1:
                victim.send_signal(signal.SIGSTOP)
                wait_until(lambda pid=victim.pid: is_stopped(pid))
            elif action == "continue":
                resume(victim)
            elif action == "kill" and number % 3 == 0:
                victim.kill()
                victim.wait()
                pool.remove(victim)
                pool.append(r.spawn(threads=2))


@pytest.mark.parametrize("n_threads", [2, 4])
def test_leases_shorter_than_a_task_still_end(n_threads: int) -> None:
    """Every claim is stolen before it is finished; the first whole result wins."""
    with rig([700, 700], lease_us=1, head_dim=256, kv_dtype=F32) as r:
        workers = [r.thread_worker(row, n_threads) for row in range(3)]
        for worker in workers:
            worker.start()
        exchange = r.exchange()
        plans = [Plan(r, [0, 1], [700, 650], number) for number in range(20)]
        for plan in plans:
            plan.run(exchange)
        for worker in workers:
            worker.stop()
        rows = r.control.worker_rows()
        # Each task of each layer was finished exactly once, however often it was computed.
        assert int(rows["tasks"].sum()) == 2 * sum(plan.n_tasks for plan in plans)
