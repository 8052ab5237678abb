"""The pool as a whole: everybody dies in mid-job; a sleeper of long ago wakes to another world."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest

import neo_native as nn
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


def check_job(r: Rig, exchange: nn.Exchange, layer: int, channel: int = 0) -> None:
    """One layer of all five rows of the plan begun last, published here."""
    q = r.queries(5)
    exchange.publish(channel, layer, q)
    assert exchange.wait(channel, 60.0)
    collect_and_check(r, exchange, layer, q, channel)


def collect_and_check(
    r: Rig, exchange: nn.Exchange, layer: int, q: nn.Array, channel: int = 0
) -> None:
    out = np.zeros_like(q)
    exchange.collect(channel, out)
    slots, lens = np.arange(5, dtype=np.uint32), np.array(TOKENS, np.uint32)
    np.testing.assert_allclose(out, r.expected(layer, q, slots, lens), atol=tolerance(F32), rtol=0)


def begin(exchange: nn.Exchange, plan_id: int) -> None:
    slots, lens = np.arange(5, dtype=np.uint32), np.array(TOKENS, np.uint32)
    exchange.begin_plan(plan_id, (slots, NONE), (lens, NONE))


@pytest.mark.parametrize("point", POINTS)
def test_when_every_worker_dies_in_mid_job_a_latecomer_finishes_it(point: str) -> None:
    """Each dies at a task of its own; some tasks are finished, claimed, half written, untouched."""
    with rig(TOKENS, lease_us=SHORT_LEASE_US) as r:
        victims = []
        for n in (1, 2, 3):
            victims.append(r.spawn(f"{point}=kill@{n}"))
            r.wait_for_workers(n)
        exchange = r.exchange()
        begin(exchange, 0)
        q = r.queries(5)
        exchange.publish(0, 0, q)
        # One may finish the job before another reaches its fault; that one dies in the next layer.
        layer = 0
        while any(victim.poll() is None for victim in victims):
            if exchange.wait(0, 0.02):
                collect_and_check(r, exchange, layer, q)
                layer += 1
                if layer == r.dim("n_layers"):
                    exchange.end_plan()
                    begin(exchange, 1)
                    layer = 0
                q = r.queries(5)
                exchange.publish(0, layer, q)
        assert [victim.wait(30) for victim in victims] == [-signal.SIGKILL] * 3
        r.spawn()
        assert exchange.wait(0, 60.0)
        collect_and_check(r, exchange, layer, q)
        exchange.end_plan()


def test_a_job_that_nobody_finishes_is_given_up_and_the_next_pool_does_not_touch_it() -> None:
    with rig(TOKENS, lease_us=SHORT_LEASE_US) as r:
        victim = r.spawn("computing=kill@2")
        r.wait_for_workers(1)
        exchange = r.exchange()
        begin(exchange, 0)
        exchange.publish(0, 0, r.queries(5))
        assert victim.wait(30) == -signal.SIGKILL
        assert not exchange.wait(0, 0.02)
        exchange.abort(0)
        assert not exchange.wait(0, 60.0)  # at once: nobody is waited for
        with pytest.raises(nn.NativeError, match="not done"):
            exchange.collect(0, np.zeros((5, 8, 64), np.float32))
        exchange.end_plan()
        r.spawn()
        wait_until(lambda: int(r.control.worker_rows()["pid"][0]) not in (0, victim.pid))
        r.wait_for_workers(1)
        begin(exchange, 1)
        for layer in range(r.dim("n_layers")):
            check_job(r, exchange, layer)
        exchange.end_plan()


@pytest.mark.parametrize("plans_between", [1, 40])
@pytest.mark.parametrize("point", POINTS)
def test_a_sleeper_wakes_after_its_pages_went_to_others(point: str, plans_between: int) -> None:
    """Its slot, pages, task words and descriptor slot have all been reused, many epochs later."""
    draw = random.Random(plans_between)
    with rig(TOKENS, n_pages=70, lease_us=SHORT_LEASE_US) as r:  # no page to spare
        victim = r.spawn(f"{point}=stop@2", threads=2)
        r.wait_for_workers(1)
        r.spawn()
        r.wait_for_workers(2)
        exchange = r.exchange()
        number = 0
        while not is_stopped(victim.pid):
            Plan(r, list(range(5)), TOKENS, number).run(exchange, number % 2)
            number += 1
            assert number < 4000, "the fault never fired"
        r.fill(TOKENS)  # the same pages, dealt out anew, with other contents
        for i in range(plans_between + 10):
            if i == plans_between:
                resume(victim)
            slots = draw.sample(range(5), draw.randint(1, 5))
            lens = [draw.randint(1, TOKENS[slot]) for slot in slots]
            Plan(r, slots, lens, number).run(exchange, number % 2)
            number += 1
        beat = int(r.control.worker_rows()["heartbeat_ns"][0])
        wait_until(lambda: int(r.control.worker_rows()["heartbeat_ns"][0]) > beat)
        assert victim.poll() is None
        if point == "written":  # earlier, it may have seen that its descriptor was stale
            assert int(r.control.worker_rows()["lost"][0]) >= 1
