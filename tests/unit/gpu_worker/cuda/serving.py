"""The real scheduler's plans through the real executor, from the first request to the last.

There is no device: the executor's copies and iterations are recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_worker.cuda import executor as executor_module
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.plan_reader import HostPlanReader
from neo_native import (
    RowStatus,
    result_header_dtype,
    result_row_dtype,
    step_header_dtype,
    step_row_dtype,
)
from neo_server.geometry import PLANS_IN_FLIGHT
from neo_server.gpu_client import read_result, write_step
from neo_server.request import State
from neo_server.step import Step
from tests.helpers import policies
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.recorded_streams import RecordedStreams
from tests.unit.gpu_worker.cuda.recorded import (
    LAYERS,
    NoDrawing,
    RecordedEvent,
    RecordedExchange,
    RecordedStages,
    limits_of,
)
from tests.unit.neo_server.simulation import Simulation, Sizes, Slot

NEW_TOKENS = 10


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    plain_empty, plain_like = torch.empty, torch.empty_like
    unpinned = {"pin_memory": False}
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain_empty(*a, **k | unpinned))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: plain_like(*a, **k | unpinned))
    monkeypatch.setattr(executor_module, "Event", RecordedEvent)
    monkeypatch.setattr(executor_module, "Drawing", NoDrawing)
    return serve


@dataclass
class Served:
    """What a run did."""

    swaps: int = 0
    rows: int = 0
    chunks: int = 0


class Serving:
    """A scheduler, an executor, and the plans in flight between them."""

    def __init__(self, sizes: Sizes, seed: int, graphs: float, done_rate: float) -> None:
        self.draw = draw = random.Random(seed)
        policies._random.seed(seed)
        self.simulation = Simulation(sizes, seed=seed, void_rate=0.02)
        streams = RecordedStreams(draw, done_rate)
        RecordedEvent.streams = streams
        limits = limits_of(sizes)
        tables = self.simulation.tables
        self._reader = HostPlanReader(cast(Any, tables), limits)
        cache = torch.zeros(LAYERS, 2, sizes.gpu_blocks, sizes.block_size, 1, 1)
        exchange = RecordedExchange(self._reader, streams, cache)
        self._stages = stages = RecordedStages(exchange, tables, limits)

        def key_of(plan: HostPlan) -> Any:
            """No graph has more than one later chunk."""
            few = sum(len(batch.cpu_chunks) for batch in plan.batches) < 2
            return () if few and draw.random() < graphs else None

        captured = SimpleNamespace(key_of=key_of, replay=lambda _: stages.replay())

        self._runner = executor_module.CudaExecutor(
            cast(Any, stages), cast(Any, SimpleNamespace(blocks=cache)), self._reader.layout,
            cast(Any, captured), PLANS_IN_FLIGHT, lambda: True, cast(Any, None),
        )  # fmt: skip
        self._sizes = sizes
        self._flights: list[tuple[Step, Slot]] = []
        self.served = Served()

    def run(self) -> None:
        """Until every request has ended."""
        scheduler = self.simulation.scheduler
        while scheduler.has_work or self._flights:
            room = len(self._flights) < PLANS_IN_FLIGHT and scheduler.has_work
            step = scheduler.schedule() if room else None
            if step is None:
                self._collect()
            else:
                self._submit(step)

    def _submit(self, step: Step) -> None:
        sent = Slot(step_header_dtype, step_row_dtype, self._sizes)
        write_step(step, sent)  # type: ignore[arg-type]
        plan = self._reader.read(sent)  # type: ignore[arg-type]
        rows = sent.rows[: len(step.seqs)]
        self._stages.rows = rows[["slot", "kind", "start", "n_new", "stage"]].tolist()
        self._runner.submit(plan)
        self.served.rows += len(plan.slots)
        self.served.swaps += len(plan.swaps)
        self.served.chunks += sum(len(batch.cpu_chunks) for batch in plan.batches)
        self._flights.append((step, sent))

    def _collect(self) -> None:
        """The oldest plan's result; some sequence or other is aborted at it."""
        step, sent = self._flights.pop(0)
        assert RowStatus.VOIDED not in self._runner.collect().status  # each knows its token
        answers = self.simulation.model.answer(sent.header, sent.rows, sent.swaps, sent.tokens)
        got = Slot(result_header_dtype, result_row_dtype, self._sizes)
        got.header["plan_id"], got.header["n_rows"] = step.plan_id, len(answers)
        got.rows["status"][: len(answers)] = [status for status, _ in answers]
        got.rows["token"][: len(answers)] = [token for _, token in answers]
        scheduler = self.simulation.scheduler
        for seq, _ in scheduler.update(step, read_result(got)):  # type: ignore[arg-type]
            aborted = self.draw.random() < 0.02
            if len(seq.tokens) - seq.num_prompt == NEW_TOKENS or aborted:
                scheduler.finish(seq)


def serve(sizes: Sizes, seed: int, graphs: float, done_rate: float = 0.3) -> Served:
    """Some requests from begin to end. ``graphs``: share of iterations that a graph runs."""
    serving = Serving(sizes, seed, graphs, done_rate)
    simulation, draw = serving.simulation, serving.draw
    waiting = [(i, [draw.randrange(251) for _ in range(draw.randint(1, 16))]) for i in range(24)]
    sequences = [simulation.sequence(i, prompt) for i, prompt in waiting]
    for seq in sequences[::-1]:
        simulation.scheduler.add(seq)
    serving.run()
    assert simulation.is_empty()
    for seq, (i, prompt) in zip(sequences, waiting, strict=True):
        assert seq.state is State.FINISHED
        assert list(seq.tokens)[len(prompt) :] == generate(i, prompt, len(seq.tokens) - len(prompt))
    return serving.served
