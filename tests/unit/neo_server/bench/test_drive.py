from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from neo_server.bench.drive import Recorder, check_longest, drive, emptied
from neo_server.bench.workload import prompts_of
from neo_server.errors import ConfigurationError, NeoError
from neo_server.request import Finish
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import engine_on


@pytest.mark.parametrize(("policy", "place"), [("gpu-only", "gpu"), ("simple-offload", "cpu")])
async def test_a_record_says_where_its_request_decoded(policy: str, place: str) -> None:
    simulation = Simulation(Sizes(policy=policy, gpu_blocks=64, cpu_pages=64, budget=32))
    async with engine_on(simulation) as engine:
        _, records = await drive(engine, prompts_of([(5, 3), (4, 1), (7, 6)], 50, 0), 0.0)
    steps = {
        "gpu": [r.num_gpu_decodes for r in records],
        "cpu": [r.num_cpu_decodes for r in records],
    }
    assert steps.pop(place) == [2, 0, 5]  # the first token is the prefill's
    assert list(steps.values()) == [[0, 0, 0]]


class Keeper(Recorder):
    """Keeps the tokens too."""

    def push(self, text: str, token_ids: Sequence[int], finish: Finish | None = None) -> None:
        self.ids = [*getattr(self, "ids", []), *token_ids]
        super().push(text, token_ids, finish)


@pytest.mark.parametrize("policy", ["gpu-only", "simple-offload", "mixed", "neo"])
@pytest.mark.parametrize("void_rate", [0.0, 0.1])
async def test_works_on_one_engine_get_their_own_tokens_and_leave_nothing(
    policy: str, void_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neo_server.bench.drive.Recorder", Keeper)
    simulation = Simulation(Sizes(policy=policy), void_rate=void_rate)
    works = [prompts_of(lengths, 50, 3) for lengths in ([(5, 8), (9, 4)] * 6, [(3, 3)] * 5)]
    async with engine_on(simulation) as engine:
        for prompts in (*works, works[0]):
            engine.reset_metrics()
            _, records = await drive(engine, prompts, 0.0)
            await emptied(engine)
            assert simulation.is_empty()
            assert simulation.scheduler.in_flight == 0
            metrics = simulation.scheduler.metrics
            assert metrics.num_output_tokens == sum(prompt.num_output for prompt in prompts)
            for i, (prompt, record) in enumerate(zip(prompts, records, strict=True)):
                assert record.ids == generate(i, prompt.ids, prompt.num_output)
            assert sum(r.num_gpu_decodes for r in records) == metrics.num_gpu_decodes
            assert sum(r.num_cpu_decodes for r in records) == metrics.num_cpu_decodes


async def test_between_works_the_engine_is_waited_for() -> None:
    simulation = Simulation(Sizes())
    async with engine_on(simulation) as engine:
        driven = asyncio.create_task(drive(engine, prompts_of([(5, 8)] * 4, 50, 0), 0.0))
        await asyncio.sleep(0)
        assert engine.scheduler.has_work
        await emptied(engine)
        assert simulation.is_empty()
        await driven


async def test_a_plan_that_does_not_come_back_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("neo_server.bench.drive._EMPTIED_WAIT_S", 0.01)
    scheduler = SimpleNamespace(in_flight=1, has_work=False)
    engine: Any = SimpleNamespace(scheduler=scheduler)
    with pytest.raises(NeoError, match=r"1 plans are in flight 0\.01 s after"):
        await asyncio.wait_for(emptied(engine), 60)


async def test_a_cache_that_is_not_empty_between_works_is_an_error() -> None:
    simulation = Simulation(Sizes())
    async with engine_on(simulation) as engine:
        engine.scheduler.blocks.pages.take(2)
        with pytest.raises(NeoError, match=r"\(0, 2, 0\) blocks, pages and slots are held"):
            await emptied(engine)


async def test_what_the_caches_never_hold_is_refused_before_the_first_work() -> None:
    async with engine_on(Simulation(Sizes(policy="gpu-only"))) as engine:
        check_longest(engine, 8 * 2 + 1)
        with pytest.raises(ConfigurationError, match=r"18 tokens; .* the caches allow 17"):
            check_longest(engine, 8 * 2 + 2)
