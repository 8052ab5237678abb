"""What is measured of chunks and copies, launched in the interpreter; nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from neo_native import WireDType
from tests.helpers.engine_rig import Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda import chunk_trial
from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.chunk_trial import ChunkTrial, Sweep
from gpu_worker.cuda.plan import HostPlan
from tests.unit.gpu_worker.cuda.interpreted import RIDES, Device, interpretable
from tests.unit.gpu_worker.cuda.test_copy_stages import padded

__all__ = ["interpretable"]  # a fixture of every test

DECODES, CONTEXT = 2, 5


class Instant:
    """In place of an event."""

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Instant) -> float:
        return 1.0


class SmallBuckets:
    """Of the least shapes that hold these plans."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        pass

    def key_of(self, plan: HostPlan) -> tuple[Shape, ...]:
        return tuple(padded(batch) for batch in plan.batches)


class Replayed:
    """In place of a graph."""

    def __init__(self, enqueue: Callable[[], object]) -> None:
        self.replay = enqueue


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is launched, nothing captured."""

    def once(call: Callable[[], object], repeats: int) -> float:
        call()
        return 1e-3

    monkeypatch.setattr(chunk_trial, "graph_seconds", once)
    monkeypatch.setattr(chunk_trial, "COPIES", 1)
    monkeypatch.setattr(chunk_trial, "MARGIN", 1)
    monkeypatch.setattr(chunk_trial, "Buckets", SmallBuckets)
    monkeypatch.setattr(chunk_trial, "captured", Replayed)
    monkeypatch.setattr(chunk_trial, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[tuple[Device, Callable[[Any], HostPlan]]]:
    make_checkpoint(tmp_path, "llama3.2")
    rig = Rig(tmp_path, cpu_side=FakeCpuSide(), **RIDES)
    made = Device(rig, tmp_path, Shape.of, kv_dtype=WireDType.INT8)

    def read(rows: Any) -> HostPlan:
        return made._reader.read(rig.step([Row(s, k, at, [5] * n) for s, k, at, n in rows]))

    yield made, read
    rig.close()


@pytest.mark.usefixtures("untimed")
@torch.inference_mode()
@pytest.mark.soak
def test_chunks_and_copies_are_launched_in_each_size(device: Any) -> None:
    made, read = device
    limits = made._reader.limits
    trial = ChunkTrial(made.stages, read, (limits.max_rows, limits.max_tokens), DECODES, CONTEXT)
    sweep = Sweep(programs=(2,), kib=(1, 2), prefill_tiles=((16, 4, 1),))
    before = made.exchange.copy_tiles, made.stages.prefill_tiles
    lines = list(trial.chunks([7], [0, 20], ["gpu", "cpu"]))
    assert lines[0].keys() == {"decodes", "device_ms"}
    cases = [(line["earlier"], line["place"], "uncopied_ms" in line) for line in lines[1:]]
    assert cases == [
        (0, "gpu", False), (0, "cpu", False), (20, "gpu", False), (20, "cpu", True),
    ]  # fmt: skip
    lines = list(trial.chunks([7], [20], ["gpu", "cpu"], sweep))
    # Each with other tiles; the later chunk on the CPU with two sizes of copies too.
    assert [line["place"] for line in lines[1:]] == ["gpu", "cpu", "cpu", "cpu"]
    assert all("prefill_tiles" in line for line in lines[1:3])
    sizes = {(line["programs"], line["rows"] * line["tiles"]) for line in lines[-2:]}
    assert len(sizes) == 2
    assert {programs for programs, _ in sizes} == {2}
    copied = [line["copy"] for line in trial.copies([20], Sweep())]
    assert copied == [kind.name.lower() for kind in chunk_trial.LANES]
    assert (made.exchange.copy_tiles, made.stages.prefill_tiles) == before
