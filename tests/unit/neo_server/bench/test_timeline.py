from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neo_native.location import Location
from neo_native.timeline import DEVICE_LANE, HOST_LANE, RIDERS, SpanKind, Timeline
from neo_server.bench.timeline import Recording, trace_of
from neo_server.scheduler import Scheduler
from neo_server.step import Step


def fake_step(plan_id: int) -> Step:
    step = object.__new__(Step)
    object.__setattr__(step, "plan_id", plan_id)
    return step


class FakeScheduler:
    """Plans 8, 9, ... with one call that has none."""

    def __init__(self) -> None:
        self._plans = iter([None, *(fake_step(i) for i in range(8, 20))])

    def schedule(self) -> Step | None:
        return next(self._plans)

    def update(self, step: Step, result: Any) -> list[Any]:
        return [result]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording.start(Location("bench", str(tmp_path)), after=2, iterations=3)


def check_schema(trace: dict[str, Any]) -> None:
    """What Perfetto's importer of JSON takes: known phases, numbers where it wants numbers."""
    assert json.loads(json.dumps(trace)) == trace
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["name"], str)
        else:
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")


def test_plans_after_the_first_few_are_chosen_before_they_are_sent(recording: Recording) -> None:
    scheduler = FakeScheduler()
    recording.watch(cast(Scheduler, scheduler))
    assert scheduler.schedule() is None
    assert not recording.timeline.begin_plan(8)
    step = scheduler.schedule()
    assert step is not None
    assert [plan for plan in range(30) if recording.timeline.begin_plan(plan)] == [10, 11, 12]
    assert scheduler.update(step, "tokens") == ["tokens"]
    assert [(what, plan) for what, _, _, plan in recording.planned] == [("plan", 8), ("update", 8)]


def test_the_file_holds_every_span_on_one_clock(recording: Recording, tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    recording.watch(cast(Scheduler, scheduler))
    for _ in range(6):
        scheduler.schedule()
    host, device = (recording.timeline.lane(i) for i in (HOST_LANE, DEVICE_LANE))
    begin = recording.planned[2][1]
    host.add(SpanKind.ITERATION, begin + 5_000, begin + 95_000, plan_id=10, tasks=7)
    host.add(SpanKind.LINEAR, begin + 10_000, begin + 40_500, plan_id=10, layer=3, channel=1)
    device.add(SpanKind.GPU_ATTN, begin + 50_000, begin + 60_000, plan_id=10, layer=3)
    out = tmp_path / "out.json"
    recording.write(out)
    trace = json.loads(out.read_text())
    check_schema(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    planned = [event for event in spans if event["cat"] == "server"]
    assert [event["args"]["plan_id"] for event in planned] == [10, 11, 12]
    by_name = {event["name"]: event for event in spans}
    linear = by_name["linear"]
    assert linear["ts"] - planned[0]["ts"] == pytest.approx(10.0)
    assert linear["dur"] == pytest.approx(30.5)
    assert linear["args"] == {"plan_id": 10, "layer": 3, "channel": 1}
    assert by_name["iteration"]["args"] == {"plan_id": 10, "tasks": 7}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert threads[linear["pid"], linear["tid"]] == "host"
    attention = by_name["gpu_attn"]
    assert threads[attention["pid"], attention["tid"]] == "device"


def test_a_lane_that_was_too_short_is_said(
    recording: Recording, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = Timeline.create(Location("short", str(tmp_path)), lanes=3, spans=2)
    recording.timeline = short
    lane = short.lane(HOST_LANE)
    for i in range(3):
        lane.add(SpanKind.LINEAR, i, i + 1)
    recording.write(tmp_path / "out.json")
    assert "record fewer iterations" in caplog.text


def test_no_span_is_a_file_too() -> None:
    trace = trace_of([], [])
    check_schema(trace)
    assert all(event["ph"] == "M" for event in trace["traceEvents"])


def test_lanes_of_cpu_threads_are_named_by_worker_and_thread() -> None:
    lane = SimpleNamespace(index=9, pid=77, worker=4, thread=2, spans=[], lost=0)
    events = trace_of([cast(Any, lane)], [])["traceEvents"]
    named = {event["name"]: event["args"] for event in events if event["pid"] == 77}
    assert named["process_name"] == {"name": "cpu worker 4"}
    assert named["thread_name"] == {"name": "thread 2"}


def test_copies_and_riders_of_the_device_have_tracks_of_their_own(recording: Recording) -> None:
    host, device = (recording.timeline.lane(i) for i in (HOST_LANE, DEVICE_LANE))
    host.add(SpanKind.SWAP, 10, 20)
    device.add(SpanKind.LINEAR, 10, 40, channel=1)
    for direction in (1, 0, 1):
        device.add(SpanKind.SWAP, 20, 30, layer=8, channel=direction)
    for layer in range(2):
        device.add(SpanKind.HANDOFF, 20, 30, layer=layer, channel=RIDERS)
    trace = trace_of(recording.timeline.recorded(), [])
    check_schema(trace)
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    tracks = [
        (event["name"], names[event["tid"]]) for event in trace["traceEvents"] if event["ph"] == "X"
    ]
    copies = [("swap", f"copies {way}") for way in ("in", "out", "in")]
    riders = [("handoff", "riders")] * 2
    assert tracks == [("swap", "host"), ("linear", "device"), *copies, *riders]
