from __future__ import annotations

import asyncio

import pytest

from neo_server.engine import Engine
from neo_server.latencies import Histogram, Latencies
from neo_server.request import SamplingParams, StopConditions
from neo_server.step import StageTimes, Step, StepResult
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import TOKENIZER, read, submit


class Ticking(Simulation):
    """Every plan takes one second of a clock of its own."""

    now = 100.0

    async def execute(self, step: Step) -> StepResult:
        result = await super().execute(step)
        self.now += 1.0
        return result


def test_a_value_on_a_bound_is_below_it_and_one_beyond_all_is_counted_last() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, 3)
    assert histogram.counts == [2, 4, 1]
    assert histogram.sum == pytest.approx(18.0)


async def test_latencies_are_those_of_the_engines_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neo_server.scheduler.PLANS_IN_FLIGHT", 1)
    simulation = Ticking(Sizes(policy="gpu-only", max_num_seqs=1))
    engine = Engine(
        *(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100),
        clock=lambda: simulation.now,
    )
    task = asyncio.create_task(engine.run())
    first, second = (submit(engine, seed, [seed, 7, 9], max_tokens=4) for seed in range(2))
    await asyncio.gather(read(first), read(second))
    task.cancel()
    found = engine.latencies
    iterations = simulation.now - 100.0
    assert sum(found.first_token.counts) == sum(found.e2e.counts) == sum(found.queue.counts) == 2
    assert sum(found.inter_token.counts) == 2 * 3
    assert found.inter_token.sum == pytest.approx(2 * 3.0)  # one plan, one token
    # The second waits for the first one's whole life; what it waited is in all that follows.
    waited = found.queue.sum
    assert waited >= 4.0
    assert found.first_token.sum == pytest.approx(found.e2e.sum - found.inter_token.sum)
    assert found.first_token.sum > waited
    assert found.e2e.sum < 2 * iterations
    assert found.num_prompt_tokens == 6
    assert found.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}


async def test_aborted_and_failed_requests_are_counted_by_reason_only() -> None:
    simulation = Simulation(Sizes(policy="tests.unit.neo_server.test_scheduler:do_nothing"))
    engine = Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 10)
    for name in ("aborted", "failed"):
        engine.submit(name, [1], SamplingParams(seed=0), StopConditions(max_tokens=2))
    engine.abort("aborted")
    with pytest.raises(Exception, match="nothing advance"):
        await engine.run()
    found = engine.latencies
    assert found.finished == {"stop": 0, "length": 0, "abort": 1, "error": 1}
    assert sum(found.e2e.counts) == sum(found.queue.counts) == 0


async def test_a_preempted_request_has_one_queue_time() -> None:
    simulation = Simulation(Sizes(policy="gpu-only", gpu_blocks=5, max_num_seqs=4, budget=16))
    engine = Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100)
    task = asyncio.create_task(engine.run())
    await asyncio.gather(*(read(submit(engine, i, [1, 2, 3], max_tokens=6)) for i in range(4)))
    task.cancel()
    assert simulation.scheduler.metrics.num_preemptions > 0
    assert sum(engine.latencies.queue.counts) == 4
    assert sum(engine.latencies.first_token.counts) == 4


def test_stages_that_were_not_measured_are_not_counted() -> None:
    found = Latencies()
    found.note_stages(StageTimes(linear=(0.25, 0.5), cpu_wait=(0.0, 0.125), ride_wait=0.25))
    found.note_stages(StageTimes())
    counts = {name: sum(histogram.counts) for name, histogram in found.stages.items()}
    assert counts == {"linear": 1, "gpu_attn": 0, "handoff": 0, "swap": 0, "head": 0}
    assert found.stages["linear"].sum == 0.75
    assert found.handoff_wait.sum == 0.375
