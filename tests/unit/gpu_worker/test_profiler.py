"""What the profiler makes of cpu workers that are there, and of some that are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gpu_worker.model import Activations
from gpu_worker.profiler import LEAST_S, TOKENS, Profiler

LAYERS, ROWS = 5, [1, 4]


class FakeOffload:
    """Notes layers; ``done``: answers of the waits, then no more."""

    def __init__(self, done: int) -> None:
        self.done = done
        self.plans: list[list[int]] = []
        self.lengths: list[list[int]] = []

    @contextmanager
    def trial(self, slots: Any, lengths: Any) -> Iterator[None]:
        assert slots.tolist() == list(range(len(lengths)))
        self.plans.append([])
        self.lengths.append(lengths.tolist())
        yield

    def store_rows(self, layer: int, rows: Any, k: Any, v: Any) -> None:
        self.plans[-1].append(layer)
        np.testing.assert_array_equal(rows.positions + 1, self.lengths[-1])

    def publish(self, channel: int, layer: int, q: Any) -> None:
        assert self.plans[-1][-1] == layer

    def wait(self, channel: int) -> bool:
        self.done -= 1
        return self.done >= 0

    def collect(self, channel: int, out: Any) -> None:
        pass


def profiler_with(offload: FakeOffload) -> Profiler:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = SimpleNamespace(num_hidden_layers=LAYERS, **heads)
    model = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32)
    profiler = Profiler(cast(Any, model), cast(Any, None), cast(Any, offload), 8, 4, 64)
    profiler._threads, profiler._deadline = 1, float("inf")
    return profiler


def test_cpu_attention_goes_through_the_layers_of_a_plan() -> None:
    offload = FakeOffload(1 << 20)
    profiler = profiler_with(offload)
    profiler._handoff_curve(ROWS)
    surface = profiler._cpu_surface(ROWS, [16, 64])
    assert surface is not None
    assert np.array(surface["seconds"]).min() >= LEAST_S
    assert {tuple(plan) for plan in offload.plans} == {tuple(range(LAYERS))}
    assert {tuple(lengths) for lengths in offload.lengths} == {
        (length,) * rows for rows in ROWS for length in (1, 16, 64)
    }


def test_long_rows_are_measured_in_fewer_layers() -> None:
    profiler = profiler_with(FakeOffload(0))
    layers = [profiler._layers(rows, TOKENS // 8) for rows in (1, 2, 4, 8, 16)]
    assert layers == [LAYERS, 4, 2, 1, 1]


@pytest.mark.parametrize("done", [0, LAYERS - 1])
def test_without_an_answer_there_is_no_figure_of_cpu_attention(done: int) -> None:
    profiler = profiler_with(FakeOffload(done))
    assert profiler._handoff_curve(ROWS) == {"x": [1.0, 4.0], "seconds": [0.0, 0.0]}
    assert profiler._cpu_surface(ROWS, [16]) is None
    assert profiler._ride_handoff() is None


def test_workers_that_leave_between_cost_only_what_is_measured_with_them() -> None:
    offload = FakeOffload(1 << 20)
    profiler = profiler_with(offload)
    curve = profiler._handoff_curve(ROWS)
    assert min(curve["seconds"]) > 0
    offload.done = 1
    assert profiler._cpu_surface(ROWS, [16]) is None


def test_products_are_measured_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = profiler_with(FakeOffload(0))
    inputs = Activations(*(torch.zeros(5, 2, 4) for _ in range(7)))
    stages: list[int] = []
    model: Any = profiler._model
    monkeypatch.setattr(model, "embed", lambda *_: inputs, raising=False)
    monkeypatch.setattr(model, "linear_stage", lambda _, n: stages.append(n), raising=False)
    profiler._linear(5)()
    assert stages == [1]
    assert inputs.residual.flatten(1).std(dim=1).min() > 0.1
    assert inputs.attn.flatten(1).std(dim=1).min() > 0.1
