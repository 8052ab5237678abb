"""Waves through the CUDA path's kernels against the plain executor, in Triton's interpreter.

The cpu workers are real; only what the interpreter lacks (system-scope loads and stores, the
device's clock) and the pinning are replaced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import neo_native as native
from neo_native import RowKind
from protos.config import DType
from tests.helpers.engine_rig import (
    BLOCK_SIZE,
    CPU,
    MAX_LEN,
    MAX_SLOTS,
    Rig,
    Row,
    make_geometry,
    make_segment,
)
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

import triton.language as tl  # noqa: E402

from gpu_worker.cuda import exchange as device_exchange  # noqa: E402
from gpu_worker.cuda import handoff, profiler, ride_kernel, ride_trial  # noqa: E402
from gpu_worker.cuda.buckets import Shape, decode_shape, mixed_shape  # noqa: E402
from gpu_worker.cuda.buffers import Buffers  # noqa: E402
from gpu_worker.cuda.plan import HostBatch  # noqa: E402
from gpu_worker.cuda.plan_reader import HostPlanReader  # noqa: E402
from gpu_worker.cuda.profiler import CudaProfiler  # noqa: E402
from gpu_worker.cuda.ride_trial import Wave  # noqa: E402
from gpu_worker.cuda.rides import VoidRiders  # noqa: E402
from gpu_worker.cuda.stages import Stages  # noqa: E402
from gpu_worker.kv_pool import GpuCache  # noqa: E402
from gpu_worker.profiler import LEAST_S  # noqa: E402
from protos.model_config import ModelConfig  # noqa: E402

TOLERANCE = 1e-4
LAYERS, PLACES, PROMPT = 3, 2, 6
RIDES = {"ride_groups": LAYERS + 1, "ride_capacity": PLACES}


@triton.jit
def load_plain(address):  # type: ignore[no-untyped-def]
    return tl.load(address)


@triton.jit
def store_plain(address, value):  # type: ignore[no-untyped-def]
    tl.store(address, value)


@triton.jit
def no_clock(like):  # type: ignore[no-untyped-def]
    return like * 0


class Unpinned:
    """``MappedSegment`` without a driver."""

    def __init__(self, segment: native.Segment) -> None:
        self._segment = segment
        buffer = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        self._bytes = torch.from_numpy(np.ctypeslib.as_array(buffer))

    def view(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        rest = self._bytes[offset:]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)


@pytest.fixture(autouse=True)
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_load_acquire", load_plain)
    monkeypatch.setattr(handoff, "store_release", store_plain)
    monkeypatch.setattr(handoff, "_now_ns", no_clock)
    monkeypatch.setattr(ride_kernel, "load_acquire", load_plain)
    monkeypatch.setattr(ride_kernel, "load_flag", load_plain)
    monkeypatch.setattr(ride_kernel, "store_flag", store_plain)
    monkeypatch.setattr(ride_kernel, "store_release", store_plain)
    monkeypatch.setattr(ride_kernel, "now_ns", no_clock)
    monkeypatch.setattr(ride_kernel, "pause", no_clock)
    monkeypatch.setattr(device_exchange, "MappedSegment", Unpinned)


@dataclass
class Given:
    """What a plan gave."""

    logits: torch.Tensor
    tokens: list[int]
    void: list[int]


class Device:
    """Stages, buffers, caches and segments of their own."""

    def __init__(
        self, rig: Rig, folder: Path, shape_of: Callable[[HostBatch], Shape], **fields: int
    ) -> None:
        config = ModelConfig.from_pretrained(folder)
        geometry = make_geometry(config, DType.FLOAT32, **RIDES, **fields)
        kinds = native.SegmentKind
        s = SimpleNamespace(
            geometry=geometry,
            control=make_segment(kinds.CONTROL, geometry),
            work=make_segment(kinds.WORK, geometry),
            exchange=make_segment(kinds.EXCHANGE, geometry),
            cpu_cache=make_segment(kinds.CPU_CACHE, geometry),
            sequences=make_segment(kinds.SEQUENCES, geometry),
        )
        sequences = native.Sequences(s.sequences, geometry)
        for name in ("block_table", "page_table", "params"):
            getattr(sequences, name)[:] = getattr(rig.sequences, name)
        self._segments = s
        self._control = native.Control(s.control)
        self.native = native.Exchange(self._control, s.work, s.exchange, geometry)
        self._reader = HostPlanReader(sequences, rig.limits)
        blocks = MAX_SLOTS * MAX_LEN // BLOCK_SIZE
        cache = GpuCache(config, blocks, BLOCK_SIZE, torch.float32, CPU)
        layout = self._reader.layout
        self._buffers = Buffers(config, rig.limits, layout, torch.float32, CPU, True)
        self._buffers.stage_for(config, MAX_LEN)
        self.exchange = device_exchange.DeviceExchange(
            self.native,
            s,
            self._reader,
            torch.float32,
            10.0,
            CPU,  # type: ignore[arg-type]
        )
        self.stages = Stages(rig.model, cache, self._buffers, self.exchange, MAX_LEN)
        self._shape_of = shape_of
        self._void = VoidRiders(self._reader.ride_layout)
        self._workers: list[native.AttentionWorker] = []

    def start_worker(self) -> None:
        s = self._segments
        worker = native.AttentionWorker(
            self._control, s.work, s.exchange, s.cpu_cache, s.sequences, 0, 1, []
        )
        worker.start()
        self._workers.append(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, step: Any) -> Given:
        """As ``CudaExecutor`` does it."""
        plan, buffers = self._reader.read(step), self._buffers
        has_cpu = plan.rides is not None or any(batch.n_cpu_rows for batch in plan.batches)
        if has_cpu:
            self.exchange.announce(plan)
        for batch in plan.batches:
            meta = buffers.channels[batch.channel].meta
            meta[: batch.used] = torch.from_numpy(batch.meta[: batch.used])
        if plan.rides is not None:
            assert buffers.rides is not None
            buffers.rides.meta.copy_(torch.from_numpy(plan.rides.meta))
        with torch.inference_mode():
            self.stages.forward([self._shape_of(batch) for batch in plan.batches])
        if has_cpu:
            self.exchange.retire(plan)
        lost = np.zeros(len(plan.slots), np.bool_)
        given_up = buffers.rides_voided.numpy()
        void = self._void.rows(plan.rides, given_up, lost).tolist() if plan.rides else []
        assert buffers.rides is not None
        assert not buffers.rides.arrived.any(), "a replayed graph counts from zero"
        logits = [buffers.logits[b.channel, : b.n_sampled] for b in plan.batches]
        tokens = [buffers.tokens_out(b.channel)[: b.n_sampled] for b in plan.batches]
        return Given(torch.cat(logits).clone(), torch.cat(tokens).tolist(), void)


def padded(batch: HostBatch) -> Shape:
    """Wider than the batch, as for a graph."""
    if batch.decodes_only:
        cpu = batch.n_cpu_rows > 0
        shape = replace(decode_shape(batch.channel, 3, cpu), splits=1)
    else:
        shape = replace(mixed_shape(24, 2, 1, batch.to_cpu), tiles=4)  # all that these plans need
    return shape.with_riders(PLACES) if batch.lead else shape


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder: Path = tmp_path_factory.mktemp("model")
    config = make_checkpoint(folder, "llama3.2").config
    draw = np.random.default_rng(3)
    return folder, draw.integers(3, config.vocab_size, (8, MAX_LEN)).tolist()


Make = Callable[..., Device]


@pytest.fixture
def make(model: Any) -> Iterator[tuple[Rig, Make]]:
    rig = Rig(model[0], cpu_side=FakeCpuSide(), **RIDES)
    made: list[Device] = []

    def device(shape_of: Callable[[HostBatch], Shape], **fields: int) -> Device:
        made.append(Device(rig, model[0], shape_of, **fields))
        return made[-1]

    yield rig, device
    for one in made:
        one.close()


def compare(rig: Rig, device: Device, *batches: list[Row], riders: list[Row]) -> Given:
    """One plan through both; logits and greedy tokens of every sampled row."""
    step = rig.step(*batches, riders=riders)
    rig.logits.clear()
    outcome = rig.executor.run(rig.reader.read(step))
    given = device.run(step)
    if not rig.logits:
        assert given.tokens == []
        return given
    expected = rig.logits[0]
    if len(batches) == 2:  # riders are in the first channel
        own = sum(row.sample for row in batches[0])
        last = sum(row.sample for row in riders)
        order = [*range(own), *range(len(expected) - last, len(expected))]
        order += range(own, len(expected) - last)
        expected = expected[order]
    torch.testing.assert_close(given.logits, expected, atol=TOLERANCE, rtol=0)
    assert sorted(given.tokens) == sorted(outcome.tokens[outcome.tokens >= 0].tolist())
    return given


def ride(slot: int, place: int, stage: int, position: int, token: int) -> Row:
    last = stage == LAYERS
    return Row(slot, RowKind.RIDE_CPU, position, [token], last, stage, place)


@pytest.mark.parametrize("shape_of", [Shape.of, padded])
def test_waves_equal_the_plain_executor(
    make: tuple[Rig, Make], model: Any, shape_of: Callable[[HostBatch], Shape]
) -> None:
    """Staggered groups beside prefills, decodes or nothing; one rider leaves in mid-wave."""
    (rig, device_of), tokens = make, model[1]
    device = device_of(shape_of)
    device.start_worker()
    prompts = [Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], False) for s in range(4)]
    compare(rig, device, prompts, riders=[])
    stages = {0: 0, 1: 0, 2: -1, 3: -3}  # of each slot's rider; below 0: it has not set out
    at = dict.fromkeys(stages, PROMPT)
    sampled = 0
    for plan in range(9):
        own: list[Row] = []
        if plan == 0:
            own = [Row(4, RowKind.PREFILL_GPU, 0, tokens[4][:PROMPT])]
        elif plan % 3:
            own = [Row(4, RowKind.DECODE_GPU, PROMPT + plan, [tokens[4][PROMPT + plan]])]
        elif plan == 3:
            own = [Row(5, RowKind.PREFILL_CPU, 0, tokens[5][:9], False)]
        if plan == 2:
            del stages[1]  # aborted
        places = {0: 0, 1: 1, 2: 5, 3: 6}
        riders = [
            ride(slot, places[slot], stage, at[slot], tokens[slot][at[slot]])
            for slot, stage in stages.items()
            if stage >= 0
        ]
        compare(rig, device, *([own] if own else []), riders=riders)
        sampled += sum(row.sample for row in riders)
        for slot, stage in stages.items():
            at[slot] += stage == LAYERS
            stages[slot] = 0 if stage == LAYERS else stage + 1
    assert sampled == 2 + 2 + 1


def test_riders_pass_with_two_sub_batches_and_ordinary_cpu_rows(
    make: tuple[Rig, Make], model: Any
) -> None:
    (rig, device_of), tokens = make, model[1]
    device = device_of(padded)
    device.start_worker()
    prompts = [Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:PROMPT], False) for s in range(3)]
    compare(rig, device, prompts, riders=[])
    for stage in range(LAYERS + 1):
        rows = [
            Row(s, RowKind.DECODE_CPU, PROMPT + stage, [tokens[s][PROMPT + stage]]) for s in (1, 2)
        ]
        rider = ride(0, 3, stage, PROMPT, tokens[0][PROMPT])
        batches = [rows[:1], rows[1:]] if stage % 2 else [rows]
        compare(rig, device, *batches, riders=[rider])


def test_a_riders_next_token_is_the_one_it_sampled(make: tuple[Rig, Make], model: Any) -> None:
    (rig, device_of), tokens = make, model[1]
    device = device_of(padded)
    device.start_worker()
    compare(rig, device, [Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT])], riders=[])
    for position in (PROMPT, PROMPT + 1):
        for stage in range(LAYERS + 1):
            compare(rig, device, riders=[ride(0, 2, stage, position, -1)])


def test_an_int8_cache_takes_riders(model: Any, make: tuple[Rig, Make]) -> None:
    """Against decodes of kind decode_cpu on an int8 cache, which differ from float32's."""
    device_of, tokens = make[1], model[1]
    rig = Rig(model[0], workers=1, kv_dtype=3, **RIDES)
    device = device_of(Shape.of, kv_dtype=3)
    device.start_worker()
    compare(rig, device, [Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT])], riders=[])
    for stage in range(LAYERS + 1):
        compare(rig, device, riders=[ride(0, 2, stage, PROMPT, tokens[0][PROMPT])])
    rig.close()


def test_a_rider_that_is_given_up_is_void_until_stage_0(make: tuple[Rig, Make], model: Any) -> None:
    (rig, device_of), tokens = make, model[1]
    device = device_of(padded)
    rows = [Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:PROMPT], False)]
    device.run(rig.step(rows))
    own = [Row(4, RowKind.PREFILL_GPU, 0, tokens[4][:PROMPT])]
    expected = device.run(rig.step(own)).logits
    assert device.run(rig.step(riders=[ride(0, 3, 0, PROMPT, 7)])).void == []
    device.native.ride_abort_through(1)  # nobody works: the watchdog
    given = device.run(rig.step(own, riders=[ride(0, 3, 1, PROMPT, 0)]))
    assert given.void == [1]
    torch.testing.assert_close(given.logits, expected)
    device.start_worker()
    assert device.run(rig.step(riders=[ride(0, 3, 2, PROMPT, 0)])).void == [0]
    compare(rig, device, rows, riders=[])
    for stage in range(LAYERS + 1):
        given = compare(rig, device, riders=[ride(0, 3, stage, PROMPT, tokens[0][PROMPT])])
        assert given.void == []


def test_a_row_whose_token_never_came_is_void(make: tuple[Rig, Make], model: Any) -> None:
    rig = make[0]
    reader = HostPlanReader(rig.sequences, rig.limits)
    void = VoidRiders(reader.ride_layout)
    none = np.zeros(LAYERS + 1, np.int32)
    for stage in range(LAYERS + 1):
        riders = [ride(s, s, stage, PROMPT, -1) for s in (0, 1)]
        plan = reader.read(rig.step([Row(4, RowKind.PREFILL_GPU, 0, [5, 6])], riders=riders))
        assert plan.rides is not None
        assert plan.continued.tolist() == [False, stage == 0, stage == 0]
        lost = plan.continued & (plan.slots == 1)
        assert void.rows(plan.rides, none, lost).tolist() == [2]
    plan = reader.read(rig.step(riders=[replace(riders[1], stage=0, sample=False)]))
    assert plan.rides is not None
    assert void.rows(plan.rides, none, np.zeros(1, np.bool_)).tolist() == []


@pytest.mark.parametrize("riders", [0, 1, PLACES])
def test_a_wave_that_is_measured_does_its_jobs(make: tuple[Rig, Make], riders: int) -> None:
    """Once all groups move, each plan takes back a job of every stage but the first."""
    device = make[1](padded)
    device.start_worker()
    wave = Wave(device.stages, device.native, riders)
    rides = device.stages.buffers.rides
    assert rides is not None
    for plan in range(wave.plans_to_fill + 2):
        wave.advance()
        with torch.inference_mode():
            device.stages.forward([Shape(0, PLACES + 1, 0, lead=PLACES)])
        wave.retire()
        moving = min(plan, LAYERS) if riders else 0
        assert int((rides.fields["collects"] != 0).sum()) == moving
        assert int(rides.fields["count"].sum()) == riders * min(plan + 1, LAYERS + 1)
        assert not device.stages.buffers.rides_voided.any()
        assert not rides.arrived.any()
    published = int(rides.fields["publishes"].max())
    assert published == (riders > 0) * (sum(range(1, LAYERS + 1)) + 3 * LAYERS)


@pytest.mark.parametrize("max_rows", [1, 2 * PLACES, 2 * PLACES + 1])
def test_a_wave_that_is_measured_has_no_more_rows_than_a_plan(
    make: tuple[Rig, Make], max_rows: int
) -> None:
    """As many groups as there are layers and one, of a capacity that is rounded up."""
    rig, device_of = make
    rig.limits = replace(rig.limits, max_rows=max_rows)
    device = device_of(padded, max_rows=max_rows)
    for riders in (1, PLACES):
        wave = Wave(device.stages, device.native, riders)
        rides = device.stages.buffers.rides
        assert rides is not None
        for _ in range(wave.plans_to_fill + 1):
            wave.advance()
            wave.retire()
        assert int(rides.fields["count"].sum()) == riders * wave.groups
        assert wave.groups == min(max_rows // riders, LAYERS + 1)


def test_riders_are_measured_beside_decodes_and_against_as_many_rows(
    make: tuple[Rig, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations run as they are in place of graphs, and take a second for each place of riders."""
    rig, device = make[0], make[1](padded)
    device.start_worker()
    launched: list[Shape] = []
    forward = device.stages.forward

    def noted(shapes: list[Shape]) -> None:
        launched.extend(shapes)
        forward(shapes)

    def seconds(enqueue: Callable[[], None], *_: object) -> float:
        enqueue()
        return 1.0 + launched[-1].lead

    monkeypatch.setattr(device.stages, "forward", noted)
    monkeypatch.setattr(ride_trial, "captured", lambda enqueue: enqueue)
    monkeypatch.setattr(ride_trial, "replayed", seconds)
    cache: Any = device.stages.cache
    nothing: Any = None
    measuring = CudaProfiler(rig.model, cache, nothing, 8, 3, MAX_LEN)
    measuring.use(device.stages, device.native)
    with torch.inference_mode():
        found = measuring.riders(1, PLACES, 2, 8)()
    assert (found.riding, found.alone) == (1.0 + PLACES, 1.0)
    riding, alone = launched[-2:]
    assert (riding.lead, alone.lead, riding.gpu_rows) == (PLACES, 0, 2)
    assert riding.tokens == alone.tokens == PLACES + 2
    fields = device.stages.buffers.channels[0].fields
    assert fields["row_tokens"][:2].tolist() == [PLACES, PLACES + 1]
    assert fields["row_lens"][:2].tolist() == [8, 8]
    assert device.native.ride_progress() > 0


class Clock:
    """Graphs that run as they are, whose every layer takes as long as this says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: Stages) -> None:
        self.layer_s = 0.0
        self.layers: list[int] = []  # of each graph
        self._waits = 0
        join = stages.join

        def counted(shape: Shape, layer: int) -> None:
            self._waits += 1
            join(shape, layer)

        monkeypatch.setattr(stages, "join", counted)
        monkeypatch.setattr(profiler, "captured", lambda enqueue: enqueue)
        monkeypatch.setattr(profiler, "replayed", self._replayed)

    def _replayed(self, enqueue: Callable[[], None], *_: object) -> float:
        self._waits = 0
        enqueue()
        self.layers.append(self._waits)
        return self.layer_s * self._waits


def measuring_profiler(rig: Rig, device: Device) -> CudaProfiler:
    nothing: Any = None
    measuring = CudaProfiler(rig.model, device.stages.cache, nothing, 8, 3, MAX_LEN)
    measuring.use(device.stages, device.native)
    return measuring


@pytest.mark.parametrize(("most", "layers"), [(MAX_LEN * 3 * LAYERS, LAYERS), (1, 1)])
def test_cpu_attention_is_what_layers_take_beyond_the_handoff(
    make: tuple[Rig, Make], monkeypatch: pytest.MonkeyPatch, most: int, layers: int
) -> None:
    """Real workers attend in every layer; rows without a hand-off of their own are in between."""
    monkeypatch.setattr("gpu_worker.profiler.TOKENS", most)
    rig, device = make[0], make[1](padded)
    device.start_worker()
    clock = Clock(monkeypatch, device.stages)
    measuring = measuring_profiler(rig, device)
    measuring._handoffs = {"x": [1.0, 3.0], "seconds": [1.0, 2.0]}
    clock.layer_s = 4.0
    with torch.inference_mode():
        assert measuring._cpu_attn(2, MAX_LEN)() == pytest.approx(4.0 - 1.5)
        assert clock.layers == [layers]
        first = device.native.done_epoch(0)
        assert first % LAYERS == layers % LAYERS, "not every layer's attention was done"
        clock.layer_s = 1.0
        assert measuring._cpu_attn(2, MAX_LEN)() == LEAST_S
    assert device.native.done_epoch(0) == first + LAYERS
    assert not device.stages.buffers.voided(0).item()


def test_a_measurement_of_cpu_attention_ends_without_cpu_workers(
    make: tuple[Rig, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog ends it; the next one is not void."""
    rig, device = make[0], make[1](padded)
    measuring = measuring_profiler(rig, device)

    def late(enqueue: Callable[[], None], _: float, give_up: Callable[[], None]) -> float:
        give_up()
        enqueue()
        raise TimeoutError

    monkeypatch.setattr(profiler, "captured", lambda enqueue: enqueue)
    monkeypatch.setattr(profiler, "replayed", late)
    with torch.inference_mode():
        run = measuring._offloaded(2, 5)
        with pytest.raises(TimeoutError):
            run()
        assert device.stages.buffers.voided(0).item()
        device.start_worker()
        clock = Clock(monkeypatch, device.stages)
        clock.layer_s = 1.0
        assert run() == 1.0
    assert not device.stages.buffers.voided(0).item()


def test_a_wave_that_is_measured_ends_without_cpu_workers(make: tuple[Rig, Make]) -> None:
    device = make[1](padded)
    wave = Wave(device.stages, device.native, 1)
    for plan in range(2):
        wave.advance()
        if plan:
            wave.give_up()
        with torch.inference_mode():
            device.stages.forward([Shape(0, PLACES + 1, 0, lead=PLACES)])
        wave.retire()
        assert device.stages.buffers.rides_voided.any() == (plan > 0)
