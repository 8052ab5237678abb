"""What riders' branch is launched behind, and what waits for it: a log of launches, no device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_worker.cuda.buckets import Shape
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.timeline import MarkedStages

LAYERS, PLACES = 3, 2
RIDDEN = Shape(0, PLACES + 4, 4, lead=PLACES)
ALONE = Shape(1, 4, 4)


class LoggedBeside:
    """In place of ``Beside``."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    @contextmanager
    def launched(self) -> Iterator[None]:
        self._log.append("fork")
        yield
        self._log.append("through")

    def join(self) -> None:
        self._log.append("join")


class LoggedStages(Stages):
    """Launches nothing."""

    def __init__(self, *, beside: bool) -> None:
        self.log: list[str] = []
        self.buffers: Any = SimpleNamespace(outcome=torch.zeros(1))
        self.exchange = None
        self._loads = None
        self._config: Any = SimpleNamespace(num_hidden_layers=LAYERS)
        self.beside: Any = LoggedBeside(self.log) if beside else None

    def _embed(self, s: Shape) -> None:
        self.log.append(f"embed {s.channel}")

    def join(self, s: Shape, layer: int) -> None:
        pass

    def linear(self, s: Shape, layer: int) -> None:
        self.log.append(f"linear {s.channel} {layer}")

    def _post_projection(self, s: Shape, layer: int) -> None:
        self.log.append(f"linear {s.channel} {layer + 1}")

    def store(self, s: Shape, layer: int) -> None:
        self.log.append(f"store {s.channel} {layer}")

    def pass_riders(self, s: Shape, layer: int) -> None:
        self.log.append(f"riders {s.channel} {layer}")

    def attend(self, s: Shape, layer: int) -> None:
        self.log.append(f"attend {s.channel} {layer}")

    def head(self, s: Shape) -> None:
        self.log.append(f"head {s.channel}")


@pytest.mark.parametrize("shapes", [[RIDDEN], [RIDDEN, ALONE]], ids=["one", "two"])
def test_riders_pass_between_two_linear_stages_of_the_rows_that_they_stand_before(
    shapes: list[Shape],
) -> None:
    stages = LoggedStages(beside=True)
    stages.forward(shapes)
    log = stages.log
    joins = [at for at, what in enumerate(log) if what == "join"]
    assert len(joins) == LAYERS
    for layer, join in enumerate(joins):
        fork = log.index("fork", joins[layer - 1] if layer else 0)
        assert log[fork : fork + 3] == ["fork", f"riders 0 {layer}", "through"]
        assert log[fork - 1] == f"linear 0 {layer}"
        between = [f"store 0 {layer}", f"attend 0 {layer}"]
        assert [what for what in log[fork + 3 : join] if " 0 " in what] == between
        assert log[join + 1] == f"linear 0 {layer + 1}"


def test_without_a_branch_riders_pass_in_line() -> None:
    stages = LoggedStages(beside=False)
    stages.forward([RIDDEN])
    assert stages.log[1:5] == ["linear 0 0", "riders 0 0", "store 0 0", "attend 0 0"]
    assert "join" not in stages.log


def test_rows_without_riders_have_no_branch() -> None:
    stages = LoggedStages(beside=True)
    stages.forward([ALONE])
    assert not {"fork", "join"} & set(stages.log)
    assert not any(what.startswith("riders") for what in stages.log)


def test_a_recorded_plan_has_its_riders_where_others_have_them() -> None:
    stages = LoggedStages(beside=True)
    assert MarkedStages(stages).beside is stages.beside
