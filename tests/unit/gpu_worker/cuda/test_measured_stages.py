"""What is measured of waves and of CPU attention, launched in the interpreter; nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from tests.helpers.engine_rig import MAX_LEN, Rig

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda import profiler, ride_trial
from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.profiler import CudaProfiler
from gpu_worker.cuda.ride_trial import Wave
from gpu_worker.cuda.stages import Stages
from gpu_worker.profiler import LEAST_S
from tests.unit.gpu_worker.cuda.interpreted import (
    LAYERS,
    PLACES,
    Device,
    Make,
    interpretable,
    make,
    model,
    padded,
)

__all__ = ["interpretable", "make", "model"]  # fixtures; the first of every test


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
    measuring = measuring_profiler(rig, device)
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
    """Graphs that run as they are, whose every layer takes and waits as long as this says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: Stages) -> None:
        self.layer_s = self.waited_s = 0.0
        self._stages = stages
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
        self._stages.buffers.waited_ns(0).fill_(int(1e9 * self.waited_s * self._waits))
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


def test_a_handoff_is_what_the_device_does_and_does_not_wait_for(
    make: tuple[Rig, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is part of T_ca: both together are what a layer takes."""
    rig, device = make[0], make[1](padded)
    device.start_worker()
    clock = Clock(monkeypatch, device.stages)
    measuring = measuring_profiler(rig, device)
    measuring._threads, measuring._deadline = 1, inf
    clock.layer_s, clock.waited_s = 4e-3, 3e-3
    with torch.inference_mode():
        assert measuring._handoff_curve([1, 2])["seconds"] == pytest.approx([1e-3, 1e-3])
        assert measuring._cpu_attn(2, MAX_LEN)() == pytest.approx(3e-3)


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
        assert run().seconds == 1.0
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


def test_what_cpu_prefills_store_and_fetch_is_measured_against_tokens_that_do_neither(
    make: tuple[Rig, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iteration takes as many seconds as it stores or fetches tokens, and one."""
    rig, device = make[0], make[1](padded)
    buffers, exchange = device.stages.buffers, device.exchange
    fields = buffers.channels[0].fields

    def seconds(enqueue: Callable[[], None]) -> float:
        enqueue()
        return 1.0 + int((fields["pages"] >= 0).sum()) + int(fields["chunk"][1])

    monkeypatch.setattr(profiler, "captured", lambda enqueue: enqueue)
    monkeypatch.setattr(profiler, "replayed", seconds)
    measuring = measuring_profiler(rig, device)
    measuring._threads, measuring._deadline = 1, inf
    exchange.tiles.zero_()
    with torch.inference_mode():
        stored, fetched = measuring._storing(), measuring._staging()
    assert stored == {"x": [8.0], "seconds": [8 / LAYERS]}
    assert exchange.tiles[: exchange.page_size * rig.model.config.head_dim].any()
    assert fetched == {"x": [float(MAX_LEN)], "seconds": [MAX_LEN / LAYERS]}
    assert buffers.staging[:, :, 0, :MAX_LEN].any()
    measuring._threads = 0
    assert measuring._storing() is None
    assert measuring._staging() is None
