from __future__ import annotations

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import BF16, F16, F32, NONE, Plan, Rig, decode, rig, tolerance

TOKENS = [300, 17, 700, 1, 64]


@pytest.mark.parametrize("spin_us", [0, 2000])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_both_channels_in_flight_give_the_reference(n_threads: int, spin_us: int) -> None:
    with rig(TOKENS, spin_us=spin_us) as r:
        workers = [r.thread_worker(row, n_threads) for row in range(2)]
        for worker in workers:
            worker.start()
        exchange = r.exchange()
        for plan_id in range(10):
            slots = r.rng.permutation(5).astype(np.uint32)
            lens = np.array([r.rng.integers(1, TOKENS[s] + 1) for s in slots], np.uint32)
            exchange.begin_plan(plan_id, (slots[:2], slots[2:]), (lens[:2], lens[2:]))
            for layer in range(2):
                q = r.queries(5)
                exchange.publish(0, layer, q[:2])
                exchange.publish(1, layer, q[2:])
                out = np.zeros_like(q)
                for channel, rows in ((1, slice(2, 5)), (0, slice(0, 2))):
                    assert exchange.wait(channel, 60.0)
                    exchange.collect(channel, out[rows])
                np.testing.assert_allclose(
                    out, r.expected(layer, q, slots, lens), atol=tolerance(F32), rtol=0
                )
            exchange.end_plan()
        for worker in workers:
            worker.stop()
        rows = r.control.worker_rows()[:2]
        assert int(rows["tasks"].sum()) > 0
        assert int(rows["lost"].sum()) == 0
        assert (rows["state"] == 3).all()


@pytest.mark.parametrize(("act", "kv"), [(F16, F16), (BF16, BF16), (F32, BF16)])
def test_sixteen_bit_types_go_through(act: int, kv: int) -> None:
    with rig([90, 33], act_dtype=act, kv_dtype=kv, head_dim=80) as r:
        worker = r.thread_worker(0)
        worker.start()
        Plan(r, [0, 1], [90, 33]).run(r.exchange(), channel=1)
        worker.stop()


def test_counters_say_what_was_read() -> None:
    with rig([100, 50]) as r:
        worker = r.thread_worker(0, 2)
        worker.start()
        Plan(r, [0, 1], [100, 50]).run(r.exchange())
        worker.stop()
        row = r.control.worker_rows()[0]
        per_token = 2 * 2 * 64 * 4  # K and V, heads, head_dim, float32
        assert int(row["kv_bytes"]) == 2 * 150 * per_token
        assert int(row["tasks"]) == 2 * 2 * 2
        assert int(row["busy_ns"]) > 0


def begin(r: Rig, exchange: nn.Exchange, lens: list[int]) -> None:
    slots = np.arange(len(lens), dtype=np.uint32)
    exchange.begin_plan(0, (slots, NONE), (np.array(lens, np.uint32), NONE))


def test_a_long_sequence_is_cut_for_every_thread_and_short_ones_are_not() -> None:
    with rig([], max_slots=8, max_pages=1024, max_tasks=4096) as r:
        exchange = r.exchange()
        begin(r, exchange, [16 * 1024])
        assert exchange.n_tasks(0) == 4  # no worker: as for one thread, 4 tasks
        exchange.end_plan()
        r.control.take_row(0, 1, 16)
        r.control.set_state(0, nn.WorkerState.READY)
        assert exchange.live_workers() == 1
        begin(r, exchange, [16 * 1024])
        assert exchange.n_tasks(0) == 64
        exchange.end_plan()
        begin(r, exchange, [100] * 8)
        assert exchange.n_tasks(0) == 16
        exchange.end_plan()
        begin(r, exchange, [16 * 1024, 100])
        assert 60 <= exchange.n_tasks(0) <= 70
        exchange.end_plan()


def test_splits_never_exceed_max_tasks() -> None:
    with rig([], max_pages=4096, max_tasks=20) as r:
        r.control.take_row(0, 1, 500)
        r.control.set_state(0, nn.WorkerState.READY)
        exchange = r.exchange()
        begin(r, exchange, [65536, 30000, 5, 9])
        assert 8 <= exchange.n_tasks(0) <= 20
        exchange.end_plan()


def test_without_workers_a_wait_ends_and_an_abort_leaves_the_channel_usable() -> None:
    with rig([50]) as r:
        exchange = r.exchange()
        begin(r, exchange, [50])
        exchange.publish(0, 0, r.queries(1))
        assert not exchange.wait(0, 0.02)
        with pytest.raises(nn.NativeError, match="neither done nor aborted"):
            exchange.publish(0, 1, r.queries(1))
        with pytest.raises(nn.NativeError, match="not done"):
            exchange.collect(0, r.queries(1))
        exchange.abort(0)
        assert not exchange.wait(0, 60.0)
        exchange.end_plan()
        worker = r.thread_worker(0)
        worker.start()
        Plan(r, [0], [50], plan_id=1).run(exchange)
        worker.stop()


def test_a_worker_that_joins_late_finds_the_pending_job() -> None:
    with rig([50]) as r:
        exchange = r.exchange()
        begin(r, exchange, [50])
        q = r.queries(1)
        exchange.publish(0, 0, q)
        worker = r.thread_worker(3)
        worker.start()
        assert exchange.wait(0, 60.0)
        out = np.zeros_like(q)
        exchange.collect(0, out)
        np.testing.assert_allclose(
            decode(out, F32),
            r.expected(0, q, np.array([0]), np.array([50])),
            atol=tolerance(F32),
            rtol=0,
        )
        worker.stop()


def test_a_new_gpu_worker_gives_up_its_predecessors_job_and_reuses_no_epoch() -> None:
    with rig([50]) as r:
        dead = []  # kept, so that no destructor ends their plans in order
        for _ in range(3):
            dead.append(r.exchange())
            begin(r, dead[-1], [50])
            dead[-1].publish(0, 0, r.queries(1))
        successor = r.exchange()
        worker = r.thread_worker(0)
        worker.start()
        Plan(r, [0], [50], plan_id=1).run(successor)
        worker.stop()
        assert int(r.control.worker_rows()["tasks"][0]) == 2 * 2


def test_a_page_table_out_of_range_crashes_nobody_and_the_job_can_be_aborted() -> None:
    with rig([50, 50]) as r:
        worker = r.thread_worker(0, 2)
        worker.start()
        exchange = r.exchange()
        good = int(r.sequences.page_table[0, 1])
        r.sequences.page_table[0, 1] = 0xFFFF_FFFF
        begin(r, exchange, [50, 50])
        exchange.publish(0, 0, r.queries(2))
        assert not exchange.wait(0, 0.2)
        exchange.abort(0)
        exchange.end_plan()
        r.sequences.page_table[0, 1] = good
        Plan(r, [0, 1], [50, 50], plan_id=1).run(exchange)
        worker.stop()


@pytest.mark.parametrize(
    ("slots", "lens", "error"),
    [
        ([8], [5], "slot is 8; it must be below max_slots, 8"),
        ([0], [0], "seq_len is 0; it must be from 1 to"),
        ([0], [769], "seq_len is 769; it must be from 1 to max_pages"),
        ([0] * 9, [1] * 9, "the plan has 9 rows; max_rows is 8"),
        ([0, 1], [1], "seq_lens has shape"),
    ],
)
def test_rows_that_do_not_fit_are_refused(slots: list[int], lens: list[int], error: str) -> None:
    with rig([]) as r, pytest.raises((IndexError, ValueError), match=error):
        r.exchange().begin_plan(
            0, (np.array(slots, np.uint32), NONE), (np.array(lens, np.uint32), NONE)
        )


def test_calls_out_of_order_are_refused() -> None:
    with rig([50]) as r:
        exchange = r.exchange()
        with pytest.raises(nn.NativeError, match="end_plan without begin_plan"):
            exchange.end_plan()
        begin(r, exchange, [50])
        with pytest.raises(nn.NativeError, match="begins before end_plan"):
            begin(r, exchange, [50])
        with pytest.raises(nn.NativeError, match="wait without a published job"):
            exchange.wait(0, 0.0)
        with pytest.raises(nn.NativeError, match="without rows"):
            exchange.publish(1, 0, np.zeros((0, 8, 64), np.float32))
        with pytest.raises(ValueError, match="layer is 2"):
            exchange.publish(0, 2, r.queries(1))
        with pytest.raises(IndexError, match="channel is 2"):
            exchange.abort(2)


@pytest.mark.parametrize(
    "fault",
    [
        "claimed",
        "claimed=kill",
        "here=kill@1",
        "claimed=kill@0",
        "claimed=hurt@1",
        "claimed=kill@1x",
    ],
)
def test_a_malformed_fault_is_refused(fault: str) -> None:
    with rig([]) as r, pytest.raises(ValueError, match="fault is"):
        r.thread_worker(0, 1, fault)


def test_threads_and_cores_that_do_not_fit_are_refused() -> None:
    with rig([]) as r:
        with pytest.raises(ValueError, match="n_threads is 0"):
            r.thread_worker(0, 0)
        with pytest.raises(IndexError, match="worker row is 6; max_workers is 6"):
            r.thread_worker(6)
        s = r.segments
        with pytest.raises(ValueError, match="cores has 1 entries"):
            nn.AttentionWorker(r.control, s.work, s.exchange, s.cpu_cache, s.sequences, 0, 2, [0])
