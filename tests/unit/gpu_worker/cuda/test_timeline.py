"""Marks around the device's stages, with a clock in place of CUDA events."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda import timeline as cuda_timeline
from gpu_worker.cuda.buckets import Key, Shape
from gpu_worker.cuda.buffers import Buffers
from gpu_worker.cuda.events import Event
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.streams import Lane
from gpu_worker.cuda.timeline import DeviceRecorder, Mark, MarkedGraph, MarkedGraphs, MarkedStages
from gpu_worker.kv_pool import GpuCache
from neo_native import RowKind
from neo_native.location import Location
from neo_native.timeline import DEVICE_LANE, RIDERS, SpanKind, Timeline
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import BLOCK_SIZE, CPU, MAX_LEN, Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint


class ClockEvent:
    """The device's clock ticks once a millisecond, at every record."""

    ticks = itertools.count()

    def __init__(self, external: bool = False) -> None:
        pass

    def record(self) -> None:
        self.at = float(next(self.ticks))

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: ClockEvent) -> float:
        return end.at - self.at


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_timeline, "Event", ClockEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_every_stage_of_a_recorded_plan_is_between_two_events(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3.2")
    config = ModelConfig.from_pretrained(tmp_path)
    rig = Rig(tmp_path, cpu_side=FakeCpuSide())
    reader = HostPlanReader(rig.sequences, rig.limits)
    cache = GpuCache(config, rig.cache.num_blocks, BLOCK_SIZE, torch.float32, CPU)
    buffers = Buffers(config, rig.limits, reader.layout, torch.float32, CPU, False)
    stages = Stages(rig.model, cache, buffers, None, MAX_LEN)
    timeline = Timeline.create(Location("cuda", str(tmp_path)), lanes=3, spans=512)
    timeline.window(7, 8)
    recorder = DeviceRecorder(timeline, stages)
    assert [recorder.begin_plan(plan, 2) for plan in (6, 7, 8)] == [False, True, False]

    plan = reader.read(rig.step([Row(0, RowKind.PREFILL_GPU, 0, [5, 6, 7])]))
    (batch,) = plan.batches
    buffers.channels[0].meta[: batch.used] = torch.from_numpy(batch.meta[: batch.used])
    begin, end = ClockEvent(), ClockEvent()
    with torch.inference_mode():
        stages.forward([Shape.of(batch)])
        plain = buffers.logits[0, :1].clone()
        begin.record()
        recorder.stages.forward([Shape.of(batch)])
        end.record()
    assert torch.equal(buffers.logits[0, :1], plain)
    recorder.write(7, recorder.take(), begin, end, 0)
    assert recorder.take().marks == []
    with recorder.marked_copy(Lane.IN, 2):
        pass
    (copied,) = recorder.take().marks
    assert (copied.kind, copied.layer, copied.channel) == (SpanKind.SWAP, 2, 1)

    (lane,) = timeline.recorded()
    assert lane.index == DEVICE_LANE
    *marks, whole = lane.spans
    assert SpanKind(int(whole["kind"])) is SpanKind.ITERATION
    layers = config.num_hidden_layers
    each = (SpanKind.LINEAR, SpanKind.HANDOFF, SpanKind.GPU_ATTN)
    wanted = [(kind, layer) for layer in range(layers) for kind in each]
    wanted = [(SpanKind.HEAD, 0), *wanted, (SpanKind.LINEAR, layers), (SpanKind.HEAD, layers)]
    assert [(SpanKind(int(m["kind"])), int(m["layer"])) for m in marks] == wanted
    edges = [int(mark[name]) for mark in marks for name in ("begin_ns", "end_ns")]
    assert edges == sorted(edges)
    assert whole["begin_ns"] < edges[0]
    assert edges[-1] < whole["end_ns"]
    assert set(lane.spans["plan_id"].tolist()) == {7}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The keys that were captured; each graph's one mark is around its replay."""
    keys: list[Key] = []

    def capture(self: MarkedGraphs, key: Key) -> MarkedGraph:
        keys.append(key)
        mark = Mark(SpanKind.LINEAR, 1, 0, cast(Event, ClockEvent()), cast(Event, ClockEvent()))

        def replay() -> None:
            mark.begin.record()
            mark.end.record()

        return MarkedGraph(key, replay, [mark])

    monkeypatch.setattr(MarkedGraphs, "_captured", capture)
    return keys


FEW, MANY = (Shape(0, 8, 8),), (Shape(0, 64, 64),)


def test_a_graph_that_is_recorded_runs_one_plan_at_once(captured: list[Key]) -> None:
    graphs = MarkedGraphs(cast(MarkedStages, None))
    first, second = graphs.take(FEW), graphs.take(FEW)
    assert first is not second
    assert not graphs.has(FEW)
    graphs.give_back(first)
    assert graphs.has(FEW)
    assert graphs.take(MANY).key == MANY
    assert graphs.take(FEW) is first
    assert captured == [FEW, FEW, MANY]


def test_what_a_graph_that_was_replayed_marks_is_written_and_the_graph_free_again(
    captured: list[Key], tmp_path: Path
) -> None:
    timeline = Timeline.create(Location("cuda", str(tmp_path)), lanes=3, spans=16)
    timeline.window(7, 9)
    recorder = DeviceRecorder(timeline, cast(Stages, SimpleNamespace()))
    for plan in (7, 8):
        assert recorder.begin_plan(plan, 1)
        assert recorder.has(FEW) == (plan == 8)
        begin, end = ClockEvent(), ClockEvent()
        recorder.prepare(FEW)
        begin.record()
        with recorder.marked_copy(Lane.OUT, 0):
            recorder.replay(FEW)
        end.record()
        recorder.write(plan, recorder.take(), cast(Event, begin), cast(Event, end), 0)
    assert captured == [FEW]
    (lane,) = timeline.recorded()
    kinds = [SpanKind(int(span["kind"])) for span in lane.spans]
    assert kinds == [SpanKind.SWAP, SpanKind.LINEAR, SpanKind.ITERATION] * 2
    assert lane.spans["plan_id"].tolist() == [7] * 3 + [8] * 3
    for copy, stage, whole in (lane.spans[:3], lane.spans[3:]):
        assert whole["begin_ns"] < copy["begin_ns"] < stage["begin_ns"]
        assert stage["end_ns"] < copy["end_ns"] < whole["end_ns"]


def test_riders_have_a_channel_of_their_own() -> None:
    stages = MarkedStages(cast(Stages, SimpleNamespace(buffers=SimpleNamespace(rides=None))))
    stages.exchange = None
    stages.pass_riders(Shape(0, 8, 4, lead=4), 2)
    (mark,) = stages.marks.take()
    assert (mark.kind, mark.layer, mark.channel) == (SpanKind.HANDOFF, 2, RIDERS)
