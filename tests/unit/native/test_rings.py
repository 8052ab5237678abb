from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import neo_native as nn
from neo_native import segments as sg
from tests.unit.native.rig import ROOT, geometry, wait_until


@pytest.fixture
def segs() -> Iterator[sg.SegmentSet]:
    made = sg.create_all(geometry())
    yield made
    sg.unlink_all(made)
    made.close()


def send(producer: nn.StepProducer, plan_id: int) -> bool:
    slot = producer.acquire()
    if slot is None:
        return False
    slot.header["plan_id"] = plan_id
    slot.tokens[:] = plan_id
    producer.publish()
    return True


def test_a_full_ring_takes_no_more_and_an_empty_one_gives_none(segs: sg.SegmentSet) -> None:
    producer = nn.StepProducer(segs.steps, segs.geometry)
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    assert consumer.front() is None
    assert [send(producer, i) for i in range(5)] == [True] * 4 + [False]
    for i in range(4):
        slot = consumer.front()
        assert slot is not None
        assert int(slot.header["plan_id"]) == i
        consumer.release()
    assert consumer.front() is None


def test_release_and_publish_without_a_slot_are_refused(segs: sg.SegmentSet) -> None:
    producer = nn.StepProducer(segs.steps, segs.geometry)
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    with pytest.raises(nn.NativeError, match="empty ring"):
        consumer.release()
    for i in range(4):
        send(producer, i)
    with pytest.raises(nn.NativeError, match="without a free slot"):
        producer.publish()


def test_a_second_live_producer_is_refused_and_the_role_is_free_after_the_first(
    segs: sg.SegmentSet,
) -> None:
    first = nn.ResultProducer(segs.results, segs.geometry)
    with pytest.raises(nn.NativeError, match=f"live producer, process {os.getpid()}"):
        nn.ResultProducer(segs.results, segs.geometry)
    del first
    nn.ResultProducer(segs.results, segs.geometry)


CHILD = """
import sys, time
import neo_native as nn
from neo_native import segments as sg
s = sg.attach_all(sys.argv[1])
"""


def child(segs: sg.SegmentSet, code: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in [str(ROOT), *sys.path] if entry)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, segs.location.instance_id],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )


def test_the_role_of_a_killed_process_is_taken_over_and_its_half_written_slot_never_seen(
    segs: sg.SegmentSet,
) -> None:
    code = (
        "p = nn.StepProducer(s.steps, s.geometry)\n"
        "a = p.acquire(); a.header['plan_id'] = 1; p.publish()\n"
        "b = p.acquire(); b.header['plan_id'] = 666\n"
        "print('here', flush=True); time.sleep(600)\n"
    )
    process = child(segs, code)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    with pytest.raises(nn.NativeError, match=f"live producer, process {process.pid}"):
        nn.StepProducer(segs.steps, segs.geometry)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    producer = nn.StepProducer(segs.steps, segs.geometry)
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    send(producer, 2)
    seen = []
    while (slot := consumer.front()) is not None:
        seen.append(int(slot.header["plan_id"]))
        consumer.release()
    assert seen == [1, 2]


def test_items_cross_processes_in_order_and_whole(segs: sg.SegmentSet) -> None:
    n = 20_000
    code = (
        "p = nn.StepProducer(s.steps, s.geometry)\n"
        f"for i in range({n}):\n"
        "    while (slot := p.acquire()) is None: time.sleep(0)\n"
        "    slot.header['plan_id'] = i; slot.tokens[:] = i; p.publish()\n"
    )
    process = child(segs, code)
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    for i in range(n):
        assert consumer.wait(60.0)
        slot = consumer.front()
        assert slot is not None
        assert int(slot.header["plan_id"]) == i
        assert (slot.tokens == i).all()
        consumer.release()
    assert process.wait(30) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_a_sleeping_consumer_is_woken_by_publish(segs: sg.SegmentSet) -> None:
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    producer = nn.StepProducer(segs.steps, segs.geometry)
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(consumer.wait(60.0)))
    thread.start()
    send(producer, 1)
    thread.join()
    assert woken == [True]


def test_reset_empties_the_ring_but_not_under_a_living_consumer(segs: sg.SegmentSet) -> None:
    producer = nn.StepProducer(segs.steps, segs.geometry)
    send(producer, 1)
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    with pytest.raises(nn.NativeError, match="alive"):
        producer.reset()
    producer.reset(takeover=True)  # by one who knows better
    del consumer
    producer.reset()
    consumer = nn.StepConsumer(segs.steps, segs.geometry)
    assert consumer.front() is None
    send(producer, 2)
    slot = consumer.front()
    assert slot is not None
    assert int(slot.header["plan_id"]) == 2


def test_the_process_id_of_a_dead_predecessor_that_is_now_ours_does_not_block(
    segs: sg.SegmentSet,
) -> None:
    """Every container's first process is number 1: forge our own id into the role word."""
    offset = 64 + 128 + 8  # SegmentHeader, RingHeader.consumer_pid
    fd = segs.location.open("steps")
    os.pwrite(fd, np.uint32(os.getpid()).tobytes(), offset)
    os.close(fd)
    nn.StepConsumer(segs.steps, segs.geometry)


def test_takeover_replaces_a_live_process_id_that_the_lock_says_is_another_container(
    segs: sg.SegmentSet,
) -> None:
    fd = segs.location.open("steps")
    os.pwrite(fd, np.uint32(os.getppid()).tobytes(), 64 + 128 + 4)
    os.close(fd)
    with pytest.raises(nn.NativeError, match="live producer"):
        nn.StepProducer(segs.steps, segs.geometry)
    nn.StepProducer(segs.steps, segs.geometry, takeover=True)


def test_views_of_a_slot_outlive_every_other_reference(segs: sg.SegmentSet) -> None:
    attached = sg.attach_all(segs.location.instance_id)
    producer = nn.StepProducer(attached.steps, attached.geometry)
    slot = producer.acquire()
    assert slot is not None
    tokens = slot.tokens
    attached.close()
    del slot, producer, attached
    tokens[:] = 7
    wait_until(lambda: bool((tokens == 7).all()))
