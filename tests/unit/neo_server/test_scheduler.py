from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_native import RowKind
from neo_server.cost_model import CostModel, FreeCost
from neo_server.errors import ConfigurationError, PlanError
from neo_server.plan import Mode, Place, Plan, PlanRow, Rows, Seqs, SeqView, View
from neo_server.plan_check import check_plan
from neo_server.policies import POLICIES, load_policy
from neo_server.request import State
from neo_server.scheduler import HOST_CHAIN_S
from neo_server.step import Step
from protos.config import PLAN_MODES
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.simulation import Simulation, Sizes

CHURN = "tests.helpers.policies:churn"
RIDE_CHURN = "tests.helpers.policies:ride_churn"
BESIDE_GPU = "neo_server.policies.piggyback:beside_gpu"
EVERY_POLICY = [*POLICIES, CHURN, RIDE_CHURN, BESIDE_GPU]

sizes_of = st.builds(
    Sizes,
    policy=st.sampled_from(EVERY_POLICY),
    gpu_blocks=st.integers(1, 12),
    cpu_pages=st.integers(1, 8),
    block_size=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([2, 4]),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(5, 12),
    max_model_len=st.just(32),
    layers=st.integers(1, 4),
    ride_capacity=st.integers(0, 2),
)


def serve(
    simulation: Simulation, rng: random.Random, n_requests: int, depth: int = 2
) -> dict[int, list[int]]:
    """Random traffic with random aborts to its end; the outputs of those not aborted."""
    scheduler = simulation.scheduler
    limit = scheduler.max_tokens_per_sequence
    wanted: dict[int, tuple[list[int], int]] = {}
    outputs: dict[int, list[int]] = {}
    alive = {}
    in_flight: deque[Step] = deque()
    iterations = 0
    while len(wanted) < n_requests or scheduler.has_work:
        while len(wanted) < n_requests and (rng.random() < 0.4 or not scheduler.has_work):
            length = rng.randint(1, limit - 1)
            prompt = [rng.randrange(251) for _ in range(length)]
            seq = simulation.sequence(len(wanted), prompt)
            wanted[seq.id] = (prompt, rng.randint(1, limit - length))
            # Some are found finished only when their last token is there.
            seq.max_len = length + wanted[seq.id][1] if rng.random() < 0.7 else limit
            alive[seq.id] = seq
            scheduler.add(seq)
        while len(in_flight) < depth and scheduler.has_work:
            queue = [seq.id for seq in scheduler.waiting]
            step = scheduler.schedule()
            left = {seq.id for seq in scheduler.waiting}.intersection(queue)
            assert queue[len(queue) - len(left) :] == sorted(left), "someone was overtaken"
            if step is None:
                break
            in_flight.append(step)
        assert in_flight, "work exists, but nothing is planned"
        if alive and rng.random() < 0.05:  # in the middle of a plan
            aborted = alive.pop(rng.choice(sorted(alive)))
            scheduler.finish(aborted)
        step = in_flight.popleft()
        for seq, token in scheduler.update(step, simulation.compute(step)):
            outputs.setdefault(seq.id, []).append(token)
            if len(outputs[seq.id]) == wanted[seq.id][1]:
                scheduler.finish(alive.pop(seq.id))
        assert scheduler.num_waiting_tokens == sum(len(seq.tokens) for seq in scheduler.waiting)
        iterations += 1
        assert iterations < 20_000, "no end"
    for step in in_flight:  # wasted rows
        scheduler.update(step, simulation.compute(step))
    for seq_id, output in outputs.items():
        prompt, count = wanted[seq_id]
        assert output == generate(seq_id, prompt, count)[: len(output)]
    return outputs


@given(
    sizes=sizes_of,
    seed=st.integers(0, 2**32),
    void_rate=st.sampled_from([0.0, 0.2]),
    depth=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=150, deadline=None)
def test_random_traffic_on_tiny_pools_ends_with_the_right_tokens_and_empty_caches(
    sizes: Sizes, seed: int, void_rate: float, depth: int
) -> None:
    simulation = Simulation(sizes, seed, void_rate)
    if simulation.scheduler.max_tokens_per_sequence < 2:
        return
    serve(simulation, random.Random(seed), n_requests=8, depth=depth)
    assert simulation.is_empty()
    assert void_rate or not simulation.scheduler.metrics.num_voided_rows


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_serves_long_traffic(policy: str, seed: int) -> None:
    simulation = Simulation(Sizes(policy=policy, gpu_blocks=16, cpu_pages=10), seed, void_rate=0.1)
    outputs = serve(simulation, random.Random(seed), n_requests=60)
    assert len(outputs) > 30
    assert simulation.is_empty()
    metrics = simulation.scheduler.metrics
    assert metrics.num_output_tokens >= sum(map(len, outputs.values()))
    if policy == "gpu-only":
        assert metrics.num_cpu_decodes == metrics.num_swap_outs == 0
        assert metrics.num_preemptions > 0
    elif policy in ("simple-offload", "symmetric", "fastdecode-plus", "piggyback"):
        assert metrics.num_gpu_decodes == 0
        assert metrics.num_preemptions > 0
    else:
        assert min(metrics.num_cpu_decodes, metrics.num_gpu_decodes) > 0
        one_batch = policy in ("neo", RIDE_CHURN, BESIDE_GPU)
        assert metrics.iterations["one_batch" if one_batch else "two_batches"] > 0
    if policy in ("neo", CHURN):
        assert min(metrics.num_swap_outs, metrics.num_preemptions) > 0
    if policy == CHURN:
        assert metrics.num_swap_ins > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ride_capacity", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_makes_the_kinds_of_plan_that_it_names(
    policy: str, ride_capacity: int, seed: int
) -> None:
    sizes = Sizes(policy, gpu_blocks=16, cpu_pages=12, ride_capacity=ride_capacity, budget=16)
    simulation = Simulation(sizes, seed, void_rate=0.1)
    serve(simulation, random.Random(seed), n_requests=40)
    made = {Mode(kind) for kind, count in simulation.scheduler.metrics.iterations.items() if count}
    named = load_policy(policy).modes
    assert made <= named
    if policy != "neo":
        assert made == named - (frozenset() if ride_capacity else {Mode.PIGGYBACK})
    assert {*PLAN_MODES} == {*Mode}


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_whole_prompts_are_served_without_chunks(policy: str) -> None:
    simulation = Simulation(Sizes(policy=policy, budget=32, chunked=False, gpu_blocks=16))
    serve(simulation, random.Random(1), n_requests=30)
    assert simulation.is_empty()


@pytest.mark.parametrize("policy", ["neo", "gpu-only"])
def test_without_a_cpu_worker_everything_still_ends(policy: str) -> None:
    simulation = Simulation(Sizes(policy=policy, gpu_blocks=16), cpu_workers=0)
    serve(simulation, random.Random(2), n_requests=30)
    assert simulation.scheduler.metrics.num_cpu_decodes == 0
    assert simulation.is_empty()


def test_neo_brings_requests_back_when_its_workers_are_gone() -> None:
    simulation = Simulation(Sizes(gpu_blocks=6, cpu_pages=8, max_model_len=16))
    scheduler = simulation.scheduler
    sequences = [simulation.sequence(i, [1, 2, 3, 4, 5]) for i in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    for _ in range(4):
        step = scheduler.schedule()
        scheduler.update(step, simulation.compute(step))
    assert any(seq.place is Place.CPU for seq in sequences)
    simulation.cpu_workers = 0
    before = scheduler.metrics.num_cpu_decodes
    while scheduler.has_work:
        step = scheduler.schedule()
        for seq, _ in scheduler.update(step, simulation.compute(step)):
            if len(seq.tokens) == 12:
                scheduler.finish(seq)
    assert scheduler.metrics.num_cpu_decodes == before
    assert simulation.is_empty()


def test_below_saturation_neo_offloads_nothing() -> None:
    simulation = Simulation(Sizes(gpu_blocks=64, cpu_pages=64))
    serve(simulation, random.Random(3), n_requests=20)
    metrics = simulation.scheduler.metrics
    assert metrics.num_cpu_decodes == metrics.num_swap_outs == 0
    assert metrics.iterations["gpu_only"] == sum(metrics.iterations.values())


def test_first_come_is_first_served() -> None:
    simulation = Simulation(Sizes(policy="gpu-only", max_num_seqs=2))
    for i in range(4):
        simulation.scheduler.add(simulation.sequence(i, [1, 2]))
    step = simulation.scheduler.schedule()
    assert [row.seq.id for row in step.rows] == [0, 1]


def test_the_latest_arrival_is_preempted_and_goes_back_in_its_place() -> None:
    simulation = Simulation(Sizes(policy="gpu-only", gpu_blocks=4, max_num_seqs=3))
    scheduler = simulation.scheduler
    sequences = [simulation.sequence(i, [1, 2, 3]) for i in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.update(step, simulation.compute(step))
    assert sequences[0].state is State.RUNNING
    assert sequences[1].num_preemptions == 1
    assert [seq.id for seq in scheduler.waiting] == [1, 2]


def test_what_an_aborted_sequence_holds_is_reused_only_after_its_plan() -> None:
    simulation = Simulation(Sizes(policy="gpu-only"))
    scheduler = simulation.scheduler
    seq = simulation.sequence(0, [1, 2, 3])
    scheduler.add(seq)
    step = scheduler.schedule()
    scheduler.finish(seq)
    assert scheduler.blocks.blocks.used == 2
    assert scheduler.update(step, simulation.compute(step)) == []
    assert simulation.is_empty()


def plan_of(batches: tuple[tuple[PlanRow, ...], ...], **moves: tuple[int, ...]) -> Plan:
    return Plan(tuple(Rows.of(batch) for batch in batches), **moves)


VIEW = View(
    waiting=(SeqView(9, Place.NOWHERE, 6, 0, 0),),
    running=Seqs.of(
        (
            SeqView(1, Place.GPU, 5, 4, 2),
            SeqView(2, Place.CPU, 5, 4, 1),
            SeqView(3, Place.GPU, 8, 4, 4),
        )
    ),
    gpu_blocks_free=1,
    gpu_blocks_total=8,
    cpu_pages_free=2,
    cpu_pages_total=4,
    block_size=2,
    page_size=4,
    seats_free=1,
    max_num_batched_tokens=6,
    max_swaps=1,
    enable_chunked_prefill=True,
    cpu_workers=1,
)
GPU_1 = PlanRow(1, RowKind.DECODE_GPU, 1)
CPU_2 = PlanRow(2, RowKind.DECODE_CPU, 1)
GOOD = [
    plan_of(((GPU_1,), (CPU_2,))),
    plan_of(((PlanRow(1, RowKind.DECODE_CPU, 1),),), swap_out=(1,)),
    plan_of(((PlanRow(9, RowKind.PREFILL_GPU, 3),),), preempt=(1,)),
    plan_of(((PlanRow(3, RowKind.PREFILL_GPU, 4), GPU_1),)),
]
BAD = [
    pytest.param(plan_of(((GPU_1,), ())), "sub-batches", id="an empty second sub-batch"),
    pytest.param(plan_of(((GPU_1, GPU_1),)), "two rows", id="two rows"),
    pytest.param(plan_of(((PlanRow(7, RowKind.DECODE_GPU, 1),),)), "unknown", id="unknown"),
    pytest.param(plan_of(((GPU_1,),), preempt=(1,)), "preempted", id="row of a preempted"),
    pytest.param(
        plan_of(((PlanRow(1, RowKind.DECODE_CPU, 1),),)), "cache is GPU", id="wrong place"
    ),
    pytest.param(plan_of(((PlanRow(1, RowKind.PREFILL_GPU, 1),),)), "PREFILL", id="no prefill"),
    pytest.param(plan_of(((PlanRow(3, RowKind.PREFILL_GPU, 5),),)), "4 left", id="too long a row"),
    pytest.param(plan_of(((PlanRow(3, RowKind.PREFILL_GPU, 0),),)), "4 left", id="an empty row"),
    pytest.param(plan_of(((PlanRow(9, RowKind.PREFILL_GPU, 1),),)), "GPU blocks", id="GPU full"),
    pytest.param(plan_of(((CPU_2,),), swap_out=(3,)), "CPU pages", id="CPU full"),
    pytest.param(plan_of(((GPU_1,),), swap_in=(2,)), "GPU blocks", id="swap-in without room"),
    pytest.param(Plan((), swap_out=(1, 3)), "max_swaps", id="too many swaps"),
    pytest.param(Plan((), swap_out=(2,)), "not running there", id="swap-out from the CPU"),
    pytest.param(Plan((), swap_out=(1,), preempt=(1,)), "moved twice", id="moved twice"),
    pytest.param(
        plan_of(((PlanRow(3, RowKind.PREFILL_GPU, 4), PlanRow(9, RowKind.PREFILL_CPU, 3)),)),
        "7 tokens",
        id="over the token budget",
    ),
]


@pytest.mark.parametrize("plan", GOOD)
def test_a_plan_within_its_means_passes(plan: Plan) -> None:
    check_plan(plan, VIEW)


@pytest.mark.parametrize(("plan", "word"), BAD)
def test_an_impossible_plan_is_refused_by_name(plan: Plan, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        check_plan(plan, VIEW)


@pytest.mark.parametrize(
    ("layers", "requests", "plans"),
    [
        pytest.param(1, 2, 3, id="short iterations, one waits"),
        pytest.param(1, 1, 2, id="short iterations, nobody waits"),
        pytest.param(int(HOST_CHAIN_S / 1e-3) + 1, 2, 2, id="long iterations"),
    ],
)
def test_a_third_plan_is_made_where_the_second_is_over_before_the_host_has_made_another(
    layers: int, requests: int, plans: int
) -> None:
    sizes = Sizes("gpu-only", max_num_seqs=1)
    simulation = Simulation(sizes, cost=FreeCost(num_layers=layers))  # 1 ms a layer
    scheduler, made = simulation.scheduler, []
    assert not scheduler.wants_plan
    for number in range(requests):
        scheduler.add(simulation.sequence(number, [1, 2, 3]))
    while scheduler.wants_plan:
        step = scheduler.schedule()
        assert step is not None
        made.append(step)
    assert len(made) == plans
    scheduler.update(made[0], simulation.compute(made[0]))
    assert scheduler.wants_plan


def test_a_third_plan_is_made_for_nobody_who_waits_where_the_host_is_late() -> None:
    simulation = Simulation(Sizes("gpu-only", max_num_seqs=1, max_model_len=32), cost=FreeCost())
    scheduler, now = simulation.scheduler, 0.0
    scheduler._clock = lambda: now
    scheduler.add(simulation.sequence(0, [1, 2, 3]))
    for plans, late_s in ((2, 1e-2), (3, 1e-2)):
        made = []
        while scheduler.wants_plan:
            step = scheduler.schedule()
            assert step is not None
            made.append(step)
        assert len(made) == plans
        for step in made:
            result = replace(simulation.compute(step), elapsed_s=5e-3)
            now += result.elapsed_s + late_s
            scheduler.update(step, result)
        for _ in range(3):
            step = scheduler.schedule()
            assert step is not None
            result = replace(simulation.compute(step), elapsed_s=5e-3)
            now += result.elapsed_s + late_s
            scheduler.update(step, result)


def test_what_comes_after_a_pause_came_not_too_late() -> None:
    simulation = Simulation(Sizes("gpu-only", max_num_seqs=1), cost=FreeCost())
    scheduler, now = simulation.scheduler, 0.0
    scheduler._clock = lambda: now
    for number in range(40):
        scheduler.add(simulation.sequence(number, [1, 2, 3]))
        step = scheduler.schedule()
        assert step is not None
        result = replace(simulation.compute(step), elapsed_s=5e-3)
        now += result.elapsed_s
        for seq, _ in scheduler.update(step, result):
            scheduler.finish(seq)
        now += 1.0
    assert not scheduler._gaps.often


def test_a_policy_that_lets_nothing_advance_is_an_error() -> None:
    simulation = Simulation(Sizes(policy=f"{__name__}:do_nothing"))
    simulation.scheduler.add(simulation.sequence(0, [1]))
    with pytest.raises(PlanError, match="nothing advance"):
        simulation.scheduler.schedule()


def do_nothing(view: View, cost: CostModel) -> Plan:
    return Plan(())


@pytest.mark.parametrize("name", ["newest-first", "no.such.module:plan", "neo_server.plan:nothing"])
def test_an_unknown_policy_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        load_policy(name)
