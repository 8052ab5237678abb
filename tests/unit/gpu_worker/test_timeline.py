"""Timelines of plans that run on the plain executor with attention threads of the extension."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_worker.timeline import KINDS
from gpu_worker.timing import StageTimes
from neo_native import RowKind
from neo_native.location import Location
from neo_native.timeline import FIRST_CPU_LANE, HOST_LANE, SpanKind, Timeline
from tests.helpers.engine_rig import Rig, Row
from tests.helpers.tiny_llama import make_checkpoint

THREADS = 2
LENGTHS = (20, 37, 5)  # of the sequences on the CPU; the first two are a sub-batch


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    return Timeline.create(Location("test", str(tmp_path)), lanes=8, spans=4096)


@pytest.fixture
def rig(tmp_path: Path, timeline: Timeline) -> Iterator[Rig]:
    make_checkpoint(tmp_path, "llama3.2")
    made = Rig(tmp_path, workers=THREADS, timeline=timeline, lease_us=10_000_000)
    made.executor.record(timeline)
    yield made
    made.close()


def run_decodes(rig: Rig, token: int) -> Any:
    """Two sub-batches: sequences on the CPU, and one on the GPU beside the last of them."""
    rows = [Row(slot, RowKind.DECODE_CPU, n, [token]) for slot, n in enumerate(LENGTHS)]
    rig.run(rows[:2], [Row(3, RowKind.DECODE_GPU, 9, [token]), rows[2]])
    return rig.executor


def prefill(rig: Rig) -> None:
    rows = [Row(slot, RowKind.PREFILL_CPU, 0, [7] * n) for slot, n in enumerate(LENGTHS)]
    rig.run([Row(3, RowKind.PREFILL_GPU, 0, [7] * 9), *rows])


def overlaps(spans: Any) -> int:
    """Pairs of neighbours in time that share some of it."""
    order = np.argsort(spans["begin_ns"], kind="stable")
    return int((spans["begin_ns"][order][1:] < spans["end_ns"][order][:-1]).sum())


def test_only_the_chosen_plans_are_recorded_and_their_stages_nest(
    rig: Rig, timeline: Timeline
) -> None:
    timeline.window(2, 4)  # the prefill is plan 1
    prefill(rig)
    for token in (3, 4, 5):
        run_decodes(rig, token)
    host = next(lane for lane in timeline.recorded() if lane.index == HOST_LANE)
    assert host.pid == os.getpid()
    assert set(host.spans["plan_id"].tolist()) == {2, 3}
    whole = host.spans["kind"] == SpanKind.ITERATION
    stages, iterations = host.spans[~whole], host.spans[whole]
    assert len(iterations) == 2
    assert overlaps(iterations) == overlaps(stages) == 0
    for iteration in iterations:
        mine = stages[stages["plan_id"] == iteration["plan_id"]]
        assert mine["begin_ns"].min() >= iteration["begin_ns"]
        assert mine["end_ns"].max() <= iteration["end_ns"]
        found = {(SpanKind(s["kind"]), int(s["layer"]), int(s["channel"])) for s in mine}
        layers = rig.model.config.num_hidden_layers
        for channel in (0, 1):
            for layer in range(layers):
                for kind in (SpanKind.LINEAR, SpanKind.HANDOFF, SpanKind.GPU_ATTN):
                    assert (kind, layer, channel) in found
                # What layer ``l`` waits for is the attention of the layer before.
                assert (SpanKind.CPU_WAIT, layer + 1, channel) in found
                assert (SpanKind.COLLECT, layer + 1, channel) in found
            assert (SpanKind.LINEAR, layers, channel) in found


def test_every_attention_task_of_a_recorded_plan_is_there_once(
    rig: Rig, timeline: Timeline
) -> None:
    timeline.window(2, 4)
    prefill(rig)
    for token in (3, 4, 5):
        run_decodes(rig, token)
    lanes = timeline.recorded()
    host = next(lane for lane in lanes if lane.index == HOST_LANE)
    cpu = [lane for lane in lanes if lane.index >= FIRST_CPU_LANE]
    assert len(cpu) == THREADS
    assert all(overlaps(lane.spans) == 0 for lane in cpu)
    tasks = np.concatenate([lane.spans for lane in cpu])
    assert (tasks["bytes"] > 0).all()
    expected = {slot: n + 1 for slot, n in enumerate(LENGTHS)}
    assert dict(zip(tasks["slot"].tolist(), tasks["tokens"].tolist(), strict=True)) == expected
    counted = 0
    for iteration in host.spans[host.spans["kind"] == SpanKind.ITERATION]:
        inside = (tasks["begin_ns"] >= iteration["begin_ns"]) & (
            tasks["end_ns"] <= iteration["end_ns"]
        )
        names = ["layer", "channel", "slot", "kv_head", "split"]
        each = {tuple(task) for task in tasks[inside][names].tolist()}
        assert len(each) == inside.sum() == iteration["tasks"]
        counted += len(each)
    assert counted == len(tasks) > 0


def test_a_lane_keeps_the_newest_spans(tmp_path: Path) -> None:
    timeline = Timeline.create(Location("short", str(tmp_path)), lanes=3, spans=4)
    lane = timeline.lane(HOST_LANE)
    for i in range(6):
        lane.add(SpanKind.LINEAR, i, i + 1, layer=i)
    (found,) = timeline.recorded()
    assert found.lost == 2
    assert found.spans["layer"].tolist() == [2, 3, 4, 5]


def test_a_worker_finds_the_timeline_or_none(tmp_path: Path) -> None:
    location = Location("there", str(tmp_path))
    assert Timeline.attach(location) is None
    created = Timeline.create(location, lanes=3, spans=4)
    attached = Timeline.attach(location)
    assert attached is not None
    created.window(5, 7)
    assert [attached.begin_plan(plan) for plan in (4, 5, 6, 7)] == [False, True, True, False]


def test_every_stage_that_is_timed_has_a_kind_of_span() -> None:
    assert set(KINDS) == {field.name for field in fields(StageTimes)} - {"elapsed"}
