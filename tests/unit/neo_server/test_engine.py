from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from neo_server.engine import Engine
from neo_server.errors import (
    DuplicateRequestError,
    GpuWorkerDiedError,
    NeoError,
    OverloadedError,
    PlanCrashError,
    PlanError,
    ShuttingDownError,
    to_status,
)
from neo_server.request import FinishReason, Output, OutputStream, SamplingParams, StopConditions
from neo_server.step import Step, StepResult
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_tokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS["byte level"]


@contextlib.asynccontextmanager
async def engine_on(
    simulation: Simulation, max_num_queued_reqs: int = 100, max_num_queued_tokens: int | None = None
) -> AsyncIterator[Engine]:
    engine = Engine(
        *(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks),
        max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
    )
    task = asyncio.create_task(engine.run())
    try:
        yield engine
        assert not task.done() or task.exception() is None
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NeoError):
            await task


def submit(
    engine: Engine, seed: int, prompt: list[int], request_id: str = "", **stop: object
) -> OutputStream:
    conditions = StopConditions(**{"max_tokens": 8, **stop})  # type: ignore[arg-type]
    return engine.submit(request_id or f"r{seed}", prompt, SamplingParams(seed=seed), conditions)


async def read(stream: OutputStream) -> Output:
    """Everything to the end, joined."""
    text, ids = "", []
    while True:
        output = await asyncio.wait_for(stream.next(), 60.0)
        text += output.text
        ids += output.token_ids
        if output.finish is not None:
            return Output(text, tuple(ids), output.finish)


@pytest.mark.parametrize("policy", ["gpu-only", "simple-offload", "mixed", "neo"])
async def test_requests_stream_their_tokens_and_text(policy: str) -> None:
    simulation = Simulation(Sizes(policy=policy))
    async with engine_on(simulation) as engine:
        prompts = [[seed, 7, 9] for seed in range(10)]
        streams = [submit(engine, seed, prompt) for seed, prompt in enumerate(prompts)]
        for seed, output in enumerate(await asyncio.gather(*map(read, streams))):
            expected = generate(seed, prompts[seed], 8)
            assert list(output.token_ids) == expected
            assert output.text == TOKENIZER.decode(expected)
            assert output.finish is not None
            assert output.finish.reason is FinishReason.LENGTH
    assert simulation.is_empty()


@pytest.mark.parametrize("seed", range(5))
async def test_streams_go_on_when_the_gpu_worker_dies_again_and_again(seed: int) -> None:
    simulation = Simulation(Sizes(gpu_blocks=16), seed, void_rate=0.1, death_rate=0.1)
    async with engine_on(simulation) as engine:
        streams = [submit(engine, i, [i, 1, 2], max_tokens=12) for i in range(12)]
        for i, output in enumerate(await asyncio.gather(*map(read, streams))):
            assert list(output.token_ids) == generate(i, [i, 1, 2], 12)
    assert simulation.scheduler.metrics.num_gpu_worker_restarts > 0
    assert simulation.is_empty()


@pytest.mark.parametrize("seed", range(5))
async def test_aborts_at_any_moment_free_both_caches_and_harm_nobody(seed: int) -> None:
    simulation = Simulation(Sizes(), seed)
    rng = random.Random(seed)
    async with engine_on(simulation) as engine:
        doomed = [f"r{i}" for i in range(20) if i % 2]
        simulation.in_flight = lambda: (
            engine.abort(doomed.pop()) if doomed and rng.random() < 0.5 else None
        )
        streams = [submit(engine, i, [i, 3, 4]) for i in range(20)]
        for i, output in enumerate(await asyncio.gather(*map(read, streams))):
            assert output.finish is not None
            if output.finish.reason is FinishReason.ABORT:
                assert i % 2
            assert list(output.token_ids) == generate(i, [i, 3, 4], 8)[: len(output.token_ids)]
        engine.abort("never heard of")
        await asyncio.sleep(0.01)
        assert not engine.scheduler.has_work
    assert simulation.is_empty()


async def test_a_request_aborted_before_its_first_plan_leaves_the_engine_asleep() -> None:
    simulation = Simulation(Sizes())
    async with engine_on(simulation) as engine:
        submit(engine, 1, [1], "gone")
        engine.abort("gone")
        await asyncio.sleep(0.01)
        assert list((await read(submit(engine, 2, [5]))).token_ids) == generate(2, [5], 8)


async def test_a_stop_token_ends_the_request_and_gives_no_text() -> None:
    tokens = generate(3, [1, 2], 8)
    async with engine_on(Simulation(Sizes())) as engine:
        stop = frozenset({tokens[4]})
        output = await read(submit(engine, 3, [1, 2], stop_token_ids=stop))
        assert list(output.token_ids) == tokens[:5]
        assert output.text == TOKENIZER.decode(tokens[:4])
        assert output.finish is not None
        assert output.finish.stop_token_id == tokens[4]
        late = await read(submit(engine, 3, [1, 2], stop_token_ids=stop, min_tokens=5))
        assert list(late.token_ids) == tokens


async def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    seed, text = next(
        (seed, text)
        for seed in range(100)
        if (text := TOKENIZER.decode(generate(seed, [1], 16))).isascii() or len(text) > 8
    )
    stop = text[5:8]
    async with engine_on(Simulation(Sizes())) as engine:
        output = await read(submit(engine, seed, [1], max_tokens=16, stop=(stop,)))
        assert output.text == text[: text.index(stop)]
        assert output.finish is not None
        assert output.finish.stop_str == stop
        with_it = await read(
            submit(engine, seed, [1], max_tokens=16, stop=(stop,), include_stop_str_in_output=True)
        )
        assert with_it.text == output.text + stop


class Deadly(Simulation):
    """Its worker dies of every plan that names a sequence of this seed."""

    deadly_seed = 13

    async def execute(self, step: Step) -> StepResult:
        if any(seq.sampling.seed == self.deadly_seed for seq in step.seqs):
            await asyncio.sleep(0)
            last = self.model.last_plan
            self.model = self.make_model()
            self.model.last_plan = max(last, step.plan_id)
            raise GpuWorkerDiedError("killed by a plan")
        return await super().execute(step)


async def test_a_request_that_kills_every_worker_ends_with_internal_and_others_go_on() -> None:
    simulation = Deadly(Sizes())
    async with engine_on(simulation) as engine:
        deadly = submit(engine, 13, [1])
        with pytest.raises(PlanCrashError, match="3 times in a row") as caught:
            await read(deadly)
        assert to_status(caught.value)[0] is grpc.StatusCode.INTERNAL
        assert list((await read(submit(engine, 2, [5]))).token_ids) == generate(2, [5], 8)
        with pytest.raises(PlanCrashError, match="3 times in a row"):  # a result came in between
            await read(submit(engine, 13, [1]))
    assert simulation.scheduler.metrics.num_gpu_worker_restarts == 6
    assert simulation.is_empty()


async def test_workers_that_die_of_every_plan_end_the_server() -> None:
    simulation = Simulation(Sizes(), death_rate=1.0)
    engine = Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100)
    streams = [submit(engine, i, [i, 1, 2]) for i in range(20)]
    with pytest.raises(PlanCrashError, match="6 times in a row"):
        await asyncio.wait_for(engine.run(), 60.0)
    for stream in streams:
        with pytest.raises(PlanCrashError):
            await stream.next()


@pytest.mark.parametrize("void_rate", [0.0, 0.2])
async def test_plans_whose_rows_were_voided_are_told(void_rate: float) -> None:
    simulation = Simulation(Sizes(policy="simple-offload"), void_rate=void_rate)
    voids = []
    engine = Engine(
        *(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100),
        lambda: voids.append(True),
    )
    task = asyncio.create_task(engine.run())
    await asyncio.gather(*(read(submit(engine, i, [i])) for i in range(4)))
    task.cancel()
    assert bool(voids) == (simulation.scheduler.metrics.num_voided_rows > 0) == (void_rate > 0)


async def test_a_warm_up_is_forgotten_with_the_lengths_of_its_request() -> None:
    simulation = Simulation(Sizes(policy="simple-offload"))
    async with engine_on(simulation) as engine:
        await read(submit(engine, 1, [1], max_tokens=4))
        view, _ = simulation.scheduler._view()
        assert (view.mean_prompt, view.mean_output) == (1.0, 4.0)
        assert view.cpu_decodes > 0.0
        engine.reset_metrics()
        view, _ = simulation.scheduler._view()
        assert (view.mean_prompt, view.mean_output, view.cpu_decodes) == (0.0, 0.0, 0.0)
        assert simulation.scheduler.metrics.num_cpu_decodes == 0
        await read(submit(engine, 2, [1, 2], max_tokens=5))
        view, _ = simulation.scheduler._view()
        assert (view.mean_prompt, view.mean_output) == (2.0, 5.0)


async def test_with_no_room_to_wait_a_request_that_finds_nobody_waiting_is_served() -> None:
    async with engine_on(Simulation(Sizes()), max_num_queued_reqs=0) as engine:
        first = submit(engine, 1, [1])
        with pytest.raises(OverloadedError):
            submit(engine, 2, [1])
        assert list((await read(first)).token_ids) == generate(1, [1], 8)


async def test_tokens_that_wait_are_limited_and_an_empty_queue_takes_any_request() -> None:
    async with engine_on(Simulation(Sizes()), max_num_queued_tokens=4) as engine:
        first = submit(engine, 1, [1, 2, 3, 4, 5])
        with pytest.raises(OverloadedError, match="the prompt has 1; max_num_queued_tokens is 4"):
            submit(engine, 2, [1])
        assert list((await read(first)).token_ids) == generate(1, [1, 2, 3, 4, 5], 8)
        second, third = submit(engine, 3, [1, 2]), submit(engine, 4, [1, 2])
        with pytest.raises(OverloadedError):
            submit(engine, 5, [1])
        assert len((await read(second)).token_ids) == len((await read(third)).token_ids) == 8


async def test_a_slow_reader_gets_few_large_outputs() -> None:
    async with engine_on(Simulation(Sizes(max_model_len=32))) as engine:
        stream = submit(engine, 1, [1], max_tokens=15)
        while engine.scheduler.has_work:
            await asyncio.sleep(0)
        assert stream.pending_tokens == 15
        output = await stream.next()
        assert list(output.token_ids) == generate(1, [1], 15)
        assert output.finish is not None


async def test_an_id_in_use_a_full_queue_and_a_draining_server_refuse() -> None:
    async with engine_on(Simulation(Sizes()), max_num_queued_reqs=2) as engine:
        first = submit(engine, 1, [1], "same")
        with pytest.raises(DuplicateRequestError, match="same"):
            submit(engine, 2, [1], "same")
        second = submit(engine, 3, [1])
        with pytest.raises(OverloadedError, match="max_num_queued_reqs is 2"):
            submit(engine, 4, [1])
        draining = asyncio.create_task(engine.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            submit(engine, 5, [1])
        await draining
        assert len((await read(first)).token_ids) == len((await read(second)).token_ids) == 8


async def test_a_drain_out_of_time_aborts_what_is_left() -> None:
    simulation = Simulation(Sizes())
    async with engine_on(simulation) as engine:
        stream = submit(engine, 1, [1])
        await engine.drain(0.0)
        output = await read(stream)
        assert output.finish is not None
        assert output.finish.reason is FinishReason.ABORT


async def test_a_broken_policy_ends_all_requests_with_its_error() -> None:
    simulation = Simulation(Sizes(policy="tests.unit.neo_server.test_scheduler:do_nothing"))
    engine = Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 10)
    stream = submit(engine, 1, [1])
    with pytest.raises(PlanError):
        await engine.run()
    with pytest.raises(PlanError, match="nothing advance"):
        await stream.next()
    with pytest.raises(ShuttingDownError):
        submit(engine, 2, [1])
