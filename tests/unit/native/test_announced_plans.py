"""Plans that a device publishes and waits for: here numpy views play the device's kernels."""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import BF16, F32, NONE, Plan, Rig, decode, rig, tolerance, wait_until

TOKENS = [300, 17, 700, 1, 64]
SPLIT_TOKENS = [1500, 17, 1500, 1, 64]  # some of them are cut between two threads
WAIT_S = 30.0


class Device:
    """Reads and writes what kernels do, at the offsets that ``device_layout`` gives."""

    def __init__(self, r: Rig) -> None:
        self.rig, self.at = r, nn.device_layout(r.geo)
        self.bytes = {
            name: np.ctypeslib.as_array(
                (ctypes.c_uint8 * segment.size).from_address(segment.address)
            )
            for name, segment in (("work", r.segments.work), ("exchange", r.segments.exchange))
        }

    def bell(self, channel: int, name: str) -> nn.Array:
        """uint64 [1]: ``published``, ``done`` or ``abort``."""
        at = self.at["channel"] + channel * self.at["channel_bytes"] + self.at[name]
        return self.bytes["work"][at : at + 8].view(np.uint64)

    def publish(self, channel: int, epoch: int, q: nn.Array) -> None:
        """Q, then the epoch: x86 keeps the order of a thread's stores. No bell is rung."""
        at = self.at["q"] + channel * self.rig.dim("max_rows") * self.at["q_row_bytes"]
        flat = np.ascontiguousarray(q).reshape(-1).view(np.uint8)
        self.bytes["exchange"][at : at + len(flat)] = flat
        self.bell(channel, "published")[0] = epoch

    def wait(self, channel: int, epoch: int, timeout_s: float = WAIT_S) -> bool:
        """False: given up, or time is up."""
        end = time.monotonic() + timeout_s
        while self.bell(channel, "done")[0] < epoch:
            if self.bell(channel, "abort")[0] >= epoch or time.monotonic() > end:
                return False
            time.sleep(1e-5)
        return True

    def task_word(self, channel: int, task: int) -> int:
        at = self.at["tasks"] + (channel * self.rig.dim("max_tasks") + task) * 8
        return int(self.bytes["work"][at : at + 8].view(np.uint64)[0])

    def area(self, worker: int, channel: int, task: int) -> tuple[nn.Array, nn.Array, nn.Array]:
        """O [group, head_dim] not normalised, m [group], l [group]."""
        group, dim = self.rig.dim("n_heads") // self.rig.dim("n_kv_heads"), self.rig.dim("head_dim")
        at = self.at["areas"] + worker * self.at["worker_area_bytes"]
        at += (channel * self.rig.dim("max_tasks") + task) * self.at["area_bytes"]
        size = group * (dim + 2) * 4
        found = self.bytes["exchange"][at : at + size].view(np.float32).astype(np.float64)
        o, m, mass = np.split(found, [group * dim, group * dim + group])
        return o.reshape(group, dim), m, mass

    def collect(self, channel: int, epoch: int, cut: nn.Array) -> nn.Array:
        """float64 [rows, n_heads, head_dim]. ``cut``: first task and splits of each row."""
        kv_heads = self.rig.dim("n_kv_heads")
        return np.stack(
            [
                np.concatenate(
                    [
                        self.merge(channel, epoch, int(first) + head * int(splits), int(splits))
                        for head in range(kv_heads)
                    ]
                )
                for first, splits in cut
            ]
        )

    def merge(self, channel: int, epoch: int, first: int, splits: int) -> nn.Array:
        parts = []
        for task in range(first, first + splits):
            word = self.task_word(channel, task)
            assert word >> self.at["task_epoch_shift"] == epoch
            worker = word >> self.at["task_worker_shift"] & self.at["task_field_mask"]
            parts.append(self.area(worker, channel, task))
        top = np.max([m for _, m, _ in parts], axis=0)
        weights = [np.exp(m - top) for _, m, _ in parts]
        total = sum(mass * w for (_, _, mass), w in zip(parts, weights, strict=True))
        return (
            sum(o * w[:, None] for (o, _, _), w in zip(parts, weights, strict=True))
            / (total[:, None])
        )


def announce(
    exchange: nn.Exchange, plan_id: int, *channels: tuple[list[int], list[int]]
) -> tuple[tuple[int, int, nn.Array], ...]:
    slots = [np.array(s, np.uint32) for s, _ in channels] + [NONE, NONE]
    lens = [np.array(n, np.uint32) for _, n in channels] + [NONE, NONE]
    return exchange.announce(plan_id, (slots[0], slots[1]), (lens[0], lens[1]))


def run_layer(
    r: Rig, device: Device, channel: int, layer: int, plan: tuple[int, int, nn.Array],
    rows: tuple[list[int], list[int]],
) -> None:  # fmt: skip
    """One job, checked against ``attend`` over the same cache and against float64."""
    epoch, q = plan[0] + layer, r.queries(len(rows[0]))
    device.publish(channel, epoch, q)
    assert device.wait(channel, epoch), "never done"
    found = device.collect(channel, epoch, plan[2])
    slots, lens = np.array(rows[0], np.uint32), np.array(rows[1], np.uint32)
    act = r.dim("act_dtype")
    for wanted in (
        decode(nn.attend(q, r.cache, layer, slots, lens), act),
        r.expected(layer, q, slots, lens),
    ):
        np.testing.assert_allclose(found, wanted, atol=tolerance(act), rtol=0)


@pytest.mark.parametrize(("act", "spin_us"), [(F32, 0), (F32, 2000), (BF16, 0)])
def test_two_plans_announced_at_once_give_what_attend_gives(act: int, spin_us: int) -> None:
    with rig(SPLIT_TOKENS, spin_us=spin_us, act_dtype=act, kv_dtype=act, max_pages=96) as r:
        workers = [r.thread_worker(row) for row in range(2)]
        for worker in workers:
            worker.start()
        exchange, device = r.exchange(), Device(r)
        first_rows = ([0, 3], [1500, 1]), ([1, 4], [17, 64])
        second_rows = ([2, 0, 1], [1400, 1500, 17]), ([4], [33])
        first = announce(exchange, 0, *first_rows)
        second = announce(exchange, 1, *second_rows)
        assert max(int(cut[:, 1].max()) for _, _, cut in (*first, *second)) > 1  # merging is tried
        for plan, rows in ((first, first_rows), (second, second_rows)):
            for layer in range(2):
                for channel in range(2):
                    run_layer(r, device, channel, layer, plan[channel], rows[channel])
        for channel in range(2):
            assert exchange.done_epoch(channel) == second[channel][0] + 1
        exchange.retire(0)
        exchange.retire(1)
        for worker in workers:
            worker.stop()


def test_epochs_of_announced_plans_follow_each_other_by_channel() -> None:
    with rig(TOKENS) as r:
        exchange = r.exchange()
        a = announce(exchange, 0, ([0, 1], [300, 17]), ([2], [700]))
        b = announce(exchange, 1, ([0], [300]))
        c = announce(exchange, 2, ([0], [300]), ([2], [700]))
        assert [b[0][0] - a[0][0], c[0][0] - b[0][0]] == [2, 2]  # layers
        assert c[1][0] - a[1][0] == 2
        assert b[1][:2] == (0, 0)
        assert len(b[1][2]) == 0
        for epoch, n_tasks, cut in (*a, b[0], *c):
            assert epoch > 0
            firsts = np.concatenate(([0], (cut[:, 1] * 2).cumsum()))  # two KV heads
            assert cut[:, 0].tolist() == firsts[:-1].tolist()
            assert n_tasks == firsts[-1]
        # A plan that the host publishes itself goes on behind them.
        for plan_id in range(3):
            exchange.retire(plan_id)
        worker = r.thread_worker(0)
        worker.start()
        Plan(r, [0], [300], plan_id=3).run(exchange)
        assert exchange.done_epoch(0) == c[0][0] + 2 + 1
        worker.stop()


def threads_now() -> list[str]:
    return [entry.name for entry in Path("/proc/self/task").iterdir()]


def voluntary_switches(thread: str) -> int:
    """How often a thread of this process went to sleep by itself; one that spins never does."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])


def test_workers_spin_without_a_bell_while_a_plan_is_announced_and_sleep_after() -> None:
    layers = 20
    with rig([50], n_layers=layers, spin_us=0) as r:
        before = set(threads_now())
        worker = r.thread_worker(0, 2)
        worker.start()
        threads = sorted(set(threads_now()) - before)
        assert len(threads) >= 2
        exchange, device = r.exchange(), Device(r)
        plan = announce(exchange, 0, ([0], [50]))[0]
        run_layer(r, device, 0, 0, plan, ([0], [50]))
        time.sleep(0.25)  # announcing wakes them; no sleep is longer than this
        counts = [voluntary_switches(thread) for thread in threads]
        for layer in range(1, layers):
            time.sleep(0.005)  # far longer than spin_us
            run_layer(r, device, 0, layer, plan, ([0], [50]))
        assert [voluntary_switches(thread) for thread in threads] == counts
        exchange.retire(0)
        for thread, count in zip(threads, counts, strict=True):
            wait_until(lambda t=thread, n=count: voluntary_switches(t) > n)
        worker.stop()


def test_retiring_an_unfinished_plan_gives_up_its_jobs_and_the_next_plan_works() -> None:
    with rig(TOKENS) as r:
        exchange, device = r.exchange(), Device(r)
        rows = ([0, 1], [300, 17])
        plan = announce(exchange, 0, rows)[0]
        device.publish(0, plan[0], r.queries(2))
        exchange.retire(0)  # nobody works on it
        assert device.bell(0, "abort")[0] == plan[0] + 1
        assert not device.wait(0, plan[0] + 1)
        worker = r.thread_worker(0)
        worker.start()
        after = announce(exchange, 1, rows)[0]
        for layer in range(2):
            run_layer(r, device, 0, layer, after, rows)
        exchange.retire(1)
        worker.stop()
        assert int(r.control.worker_rows()["tasks"][0]) == 2 * after[1]  # none of the first plan


def test_a_finished_plan_is_retired_without_an_abort() -> None:
    with rig([50]) as r:
        worker = r.thread_worker(0)
        worker.start()
        exchange, device = r.exchange(), Device(r)
        before = int(device.bell(0, "abort")[0])
        plan = announce(exchange, 0, ([0], [50]))[0]
        for layer in range(2):
            run_layer(r, device, 0, layer, plan, ([0], [50]))
        exchange.retire(0)
        assert int(device.bell(0, "abort")[0]) == before
        worker.stop()


def test_abort_through_ends_one_plan_and_spares_the_next() -> None:
    with rig(TOKENS) as r:
        exchange, device = r.exchange(), Device(r)
        rows = ([0, 1], [300, 17])
        lost, kept = (announce(exchange, plan_id, rows)[0] for plan_id in range(2))
        device.publish(0, lost[0], r.queries(2))
        assert not device.wait(0, lost[0], timeout_s=0.05)
        exchange.abort_through(0, lost[0] + 1)
        for layer in range(2):  # the device goes on and finds each layer given up
            device.publish(0, lost[0] + layer, r.queries(2))
            assert not device.wait(0, lost[0] + layer)
        worker = r.thread_worker(0)
        worker.start()
        for layer in range(2):
            run_layer(r, device, 0, layer, kept, rows)
        exchange.abort_through(0, lost[0])  # late: takes nothing back
        assert device.bell(0, "abort")[0] == lost[0] + 1
        exchange.retire(0)
        exchange.retire(1)
        worker.stop()
    with rig([]) as r, pytest.raises(IndexError, match="channel is 2"):
        r.exchange().abort_through(2, 1)


def test_an_announced_plan_holds_its_descriptor_until_it_is_retired() -> None:
    with rig(TOKENS) as r:  # four descriptors
        exchange = r.exchange()
        for plan_id in range(4):
            announce(exchange, plan_id, ([0], [300]))
        with pytest.raises(nn.NativeError, match="plan 4 is announced before plan 0 is retired"):
            announce(exchange, 4, ([0], [300]))
        exchange.retire(0)
        announce(exchange, 4, ([0], [300]))
        with pytest.raises(nn.NativeError, match="not announced"):
            exchange.retire(0)
        with pytest.raises(nn.NativeError, match="plan 5 is announced before plan 1 is retired"):
            announce(exchange, 5, ([0], [300]))


def test_a_plan_without_cpu_rows_holds_nothing() -> None:
    with rig(TOKENS) as r:
        exchange = r.exchange()
        for plan_id in (0, 4):
            assert [n for _, n, _ in announce(exchange, plan_id)] == [0, 0]
        exchange.retire(4)


def test_rows_that_do_not_fit_are_refused_and_leave_the_slot_free() -> None:
    with rig(TOKENS) as r:
        exchange = r.exchange()
        first = announce(exchange, 0, ([0], [300]))[0][0]
        with pytest.raises(IndexError, match="slot is 8"):
            announce(exchange, 1, ([0, 8], [300, 5]))
        with pytest.raises(ValueError, match="max_rows is 8"):
            announce(exchange, 1, ([0] * 9, [1] * 9))
        assert announce(exchange, 1, ([0], [300]))[0][0] == first + 2


def test_a_new_gpu_worker_gives_up_announced_plans_and_reuses_no_epoch() -> None:
    with rig(TOKENS) as r:
        dead, device = r.exchange(), Device(r)
        epochs = [announce(dead, plan_id, ([0], [300]))[0][0] for plan_id in range(3)]
        device.publish(0, epochs[0], r.queries(1))
        successor = r.exchange()
        assert not device.wait(0, epochs[0])  # given up
        worker = r.thread_worker(0)
        worker.start()
        plan = announce(successor, 0, ([0], [300]))[0]
        assert plan[0] > epochs[-1] + 1
        for layer in range(2):
            run_layer(r, device, 0, layer, plan, ([0], [300]))
        successor.retire(0)
        worker.stop()
