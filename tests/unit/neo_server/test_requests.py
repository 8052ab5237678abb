"""What a request asks for beyond its tokens: priorities, several completions, log-probabilities,
and an end at any moment of its life.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from neo_native import RowKind, RowStatus
from neo_server.errors import DuplicateRequestError
from neo_server.geometry import PLANS_IN_FLIGHT
from neo_server.policies import POLICIES
from neo_server.request import (
    FinishReason,
    Output,
    Request,
    Sequence,
    State,
    StopConditions,
    joined,
)
from neo_server.sampling import ResponseOptions, SamplingParams, TokenLogprobs, sequence_id
from neo_server.step import RowLogprobs, Step, StepResult
from tests.helpers import policies
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import TOKENIZER, engine_on, read

CHURN = "tests.helpers.policies:churn"


def sequence(simulation: Simulation, number: int, priority: int = 0) -> Sequence:
    made = simulation.sequence(number, [number + 1, 2, 3])
    made.id = sequence_id(number, priority)
    return made


@pytest.mark.parametrize("policy", [*POLICIES, CHURN])
def test_lower_priorities_go_first_and_equal_ones_as_they_came(policy: str) -> None:
    simulation = Simulation(Sizes(policy=policy, max_num_seqs=1, gpu_blocks=16))
    scheduler, rng = simulation.scheduler, random.Random(7)
    made = [sequence(simulation, i, rng.choice([-2, 0, 3])) for i in range(12)]
    for seq in made:
        seq.max_len = 5
        scheduler.add(seq)
    order = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        for seq, _ in scheduler.update(step, simulation.compute(step)):
            if len(seq.tokens) == seq.max_len:
                order.append(made.index(seq))
                scheduler.finish(seq)
    assert order == sorted(range(12), key=lambda i: made[i].id)
    assert order != list(range(12))
    assert simulation.is_empty()


def test_a_late_request_of_a_lower_priority_is_not_preempted_for_an_earlier_one() -> None:
    """Room is taken from who would be served last."""
    simulation = Simulation(Sizes(policy="gpu-only", gpu_blocks=4, max_num_seqs=3))
    scheduler = simulation.scheduler
    first, urgent = sequence(simulation, 0), sequence(simulation, 1, -1)
    for seq in (first, urgent):
        scheduler.add(seq)
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, simulation.compute(step))
    assert (first.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert urgent.state is State.RUNNING


def test_log_probabilities_reach_the_sequences_whose_rows_count() -> None:
    simulation = Simulation(Sizes(policy="gpu-only"))
    scheduler = simulation.scheduler
    seqs = [sequence(simulation, i) for i in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    step = scheduler.schedule()
    assert step is not None
    told = [TokenLogprobs(token, -1.0, 2, ((5, -0.5),)) for token in range(4)]
    rows = [RowLogprobs(0, 1, told[0]), RowLogprobs(0, 3, told[1])]
    rows += [RowLogprobs(1, 1, told[2]), RowLogprobs(1, 3, told[3])]
    result = replace(simulation.compute(step), logprobs=rows)
    scheduler.finish(seqs[1])  # meanwhile
    scheduler.update(step, result)
    assert (seqs[0].prompt_logprobs, seqs[0].logprobs) == ({1: told[0]}, told[1])
    assert (seqs[1].prompt_logprobs, seqs[1].logprobs) == ({}, None)
    step = scheduler.schedule()
    assert step is not None
    void = StepResult(step.plan_id, [RowStatus.VOIDED], [-1], 0.0, logprobs=rows[1:2])
    seqs[0].logprobs = None
    scheduler.update(step, void)
    assert seqs[0].logprobs is None


async def told_by(simulation: Simulation, sampling: SamplingParams, echo: bool) -> Output:
    """One request's outputs joined, where the worker tells a logprob of -position."""
    compute = simulation.compute

    def with_logprobs(step: Step) -> StepResult:
        result = compute(step)
        spans = zip(result.tokens, step.start.tolist(), step.n_new.tolist(), strict=True)
        rows = [
            RowLogprobs(row, at, TokenLogprobs(token, -float(at), 1, ()))
            for row, (token, start, n) in enumerate(spans)
            for at in range(max(start, 1), start + n + 1)
        ]
        return replace(result, logprobs=rows)

    simulation.compute = with_logprobs  # type: ignore[method-assign]
    async with engine_on(simulation) as engine:
        (request,) = engine.submit_all(
            *("told", TOKENIZER.encode("the fox"), [sampling], StopConditions(max_tokens=4)),
            ResponseOptions(echo=echo),
        )
        outputs: list[Output] = []
        while not outputs or outputs[-1].finish is None:
            outputs.append(await asyncio.wait_for(request.stream.next(), 30.0))
    return joined(outputs)


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_point_at_each_tokens_text(echo: bool) -> None:
    sampling = SamplingParams(seed=1, logprobs=0, prompt_logprobs=0)
    output = await told_by(Simulation(Sizes(budget=4)), sampling, echo)
    ids = TOKENIZER.encode("the fox")
    told = generate(1, ids, 4)
    assert output.text == ("the fox" if echo else "") + TOKENIZER.decode(told)
    assert [entry.token_id for entry in output.prompt_logprobs] == ids
    assert [entry.logprob for entry in output.prompt_logprobs] == [None, *range(-1, -len(ids), -1)]
    assert [entry.logprob for entry in output.logprobs] == [-len(ids) - i for i in range(4)]
    for entries, tokens, base in (
        (output.prompt_logprobs, ids, 0),
        (output.logprobs, told, len("the fox") if echo else 0),
    ):
        detokenizer, at = TOKENIZER.detokenizer(), base
        for entry, token in zip(entries, tokens, strict=True):
            assert entry.text_offset == at
            at += len(detokenizer.feed(token))


async def test_a_request_id_is_in_use_until_its_last_completion_ends() -> None:
    simulation = Simulation(Sizes())
    async with engine_on(simulation) as engine:
        samplings = [SamplingParams(seed=i) for i in range(3)]
        made = engine.submit_all("a", [1, 2], samplings, StopConditions(max_tokens=6))
        engine.abort("a", 0)
        engine.abort("a", 7)
        with pytest.raises(DuplicateRequestError):
            engine.submit("a", [1], SamplingParams(seed=0), StopConditions(max_tokens=1))
        outputs = await asyncio.gather(*(read(request.stream) for request in made))
        reasons = [output.finish.reason for output in outputs if output.finish is not None]
        assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]
        assert [list(output.token_ids) for output in outputs[1:]] == [
            generate(i, [1, 2], 6) for i in (1, 2)
        ]
        assert engine.request("a", 1) is None
        engine.submit("a", [1], SamplingParams(seed=0), StopConditions(max_tokens=1))


@dataclass
class Phased(Simulation):
    """Aborts a request the first time that a plan finds it in a phase, and counts what follows."""

    phase: Callable[[Sequence, Step], bool] = lambda _seq, _step: False
    abort: Callable[[], None] = lambda: None
    doomed: Request | None = None
    plans_after: int | None = None  # that name it

    async def execute(self, step: Step) -> StepResult:
        assert self.doomed is not None
        seq = self.doomed.sequence
        if self.plans_after is not None:
            self.plans_after += any(row.seq is seq for row in step.rows)
        elif self.phase(seq, step):
            self.abort()
            self.plans_after = 0
        return await super().execute(step)


def is_prefilled_in_part(seq: Sequence, step: Step) -> bool:
    return any(row.seq is seq and row.start + row.n_new < seq.num_prompt for row in step.rows)


def is_decoding_on_the_cpu(seq: Sequence, step: Step) -> bool:
    return any(row.seq is seq and row.kind is RowKind.DECODE_CPU for row in step.rows)


PHASES: dict[str, Callable[[Sequence, Step], bool]] = {
    "waiting": lambda seq, _: seq.state is State.WAITING,
    "chunked prefill": is_prefilled_in_part,
    "swap": lambda seq, step: any(swap.slot == seq.slot for swap in step.swaps),
    "decode on the cpu": is_decoding_on_the_cpu,
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
async def test_an_end_in_any_phase_frees_both_caches_within_the_plans_in_flight(
    phase: str, n: int
) -> None:
    sizes = Sizes(policy=CHURN, gpu_blocks=32, cpu_pages=32, max_num_seqs=3, budget=6)
    simulation = Phased(sizes, phase=PHASES[phase])
    policies._random.seed(4)  # with which each phase comes, whatever ran before
    async with engine_on(simulation) as engine:
        samplings = [SamplingParams(seed=i) for i in range(n)]
        if phase == "waiting":  # behind others
            for i in range(3):
                engine.submit(f"o{i}", [1], SamplingParams(seed=i), StopConditions(max_tokens=12))
        prompt, stop = list(range(1, 11)), StopConditions(max_tokens=20)
        made = engine.submit_all("doomed", prompt, samplings, stop)
        simulation.doomed = made[-1]
        simulation.abort = lambda: engine.abort("doomed", n - 1)
        outputs = await asyncio.gather(*(read(request.stream) for request in made))
        assert simulation.plans_after is not None, "the phase never came"
        assert simulation.plans_after < PLANS_IN_FLIGHT
        reasons = [output.finish.reason for output in outputs if output.finish is not None]
        assert reasons == [FinishReason.LENGTH] * (n - 1) + [FinishReason.ABORT]
        for seed, output in enumerate(outputs[:-1]):
            assert list(output.token_ids) == generate(seed, prompt, 20)
        async with asyncio.timeout(30.0):
            while engine.scheduler.has_work or not simulation.is_empty():
                await asyncio.sleep(0)
