from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from neo_native import RowKind
from neo_server.cost_model import CostModel
from neo_server.errors import PlanError
from neo_server.plan import Mode, Place, Plan, PlanRow, Rows, Seqs, SeqView, View
from neo_server.plan_check import check_plan
from neo_server.policies import Policy
from neo_server.policies.draft import Draft
from neo_server.request import Sequence, State
from neo_server.riders import group_capacity
from neo_server.scheduler import RUNNABLE
from neo_server.step import Step
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_scheduler import BESIDE_GPU, RIDE_CHURN, serve

LAYERS = 3


def riding(policy: str = "piggyback", **changes: object) -> Simulation:
    sizes = Sizes(
        policy=policy, gpu_blocks=32, cpu_pages=32, budget=32, layers=LAYERS, ride_capacity=2
    )
    return Simulation(Sizes(**{**vars(sizes), **changes}))  # type: ignore[arg-type]


def add(simulation: Simulation, number: int, output: int = 8) -> Sequence:
    seq = simulation.sequence(number, [number, 1, 2])
    seq.max_len = 3 + output
    simulation.scheduler.add(seq)
    return seq


def advance(simulation: Simulation) -> Step:
    step = simulation.scheduler.schedule()
    assert step is not None
    for seq, _ in simulation.scheduler.update(step, simulation.compute(step)):
        if len(seq.tokens) == seq.max_len:
            simulation.scheduler.finish(seq)
    return step


def stages(step: Step) -> dict[int, int]:
    return {row.seq.id: row.stage for row in step.rows if row.kind is RowKind.RIDE_CPU}


def finish(simulation: Simulation, *seqs: Sequence) -> None:
    """To the end, with the right tokens and nothing left behind."""
    while simulation.scheduler.has_work:
        advance(simulation)
    assert simulation.is_empty()
    for seq in seqs:
        expected = generate(seq.id, list(seq.tokens[: seq.num_prompt]), seq.num_output)
        assert list(seq.tokens[seq.num_prompt :]) == expected


def test_a_token_takes_one_plan_more_than_there_are_layers() -> None:
    simulation = riding()
    seq = add(simulation, 0)
    advance(simulation)  # the prefill gives the first token
    for token in (1, 2):
        for stage in range(LAYERS + 1):
            assert seq.num_output == token
            assert stages(advance(simulation)) == {0: stage}
    finish(simulation, seq)


def test_groups_are_staggered_and_a_late_comer_starts_with_the_group_whose_turn_it_is() -> None:
    simulation = riding(max_num_seqs=8)
    seqs = [add(simulation, i) for i in range(5)]
    advance(simulation)
    assert stages(advance(simulation)) == {0: 0, 1: 0}  # two places
    assert stages(advance(simulation)) == {0: 1, 1: 1, 2: 0, 3: 0}
    step = advance(simulation)
    assert stages(step) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 0}
    assert [row.place for row in step.rows] == [0, 1, 2, 3, 4]
    finish(simulation, *seqs)


def test_plans_of_another_kind_leave_a_wave_where_it_is() -> None:
    simulation = riding(BESIDE_GPU)
    seqs = [add(simulation, i) for i in range(2)]
    advance(simulation)
    assert stages(advance(simulation)) == {1: 0}
    policy = simulation.scheduler.policy
    simulation.scheduler.policy = Policy("gpu rows", gpu_rows)
    for _ in range(2):
        step = advance(simulation)
        assert [row.kind for row in step.rows] == [RowKind.DECODE_GPU]
    simulation.scheduler.policy = policy
    assert stages(advance(simulation)) == {1: 1}
    finish(simulation, *seqs)


def gpu_rows(view: View, cost: CostModel) -> Plan:
    draft = Draft(view)
    draft.decode(view.running.at(Place.GPU), Place.GPU)
    return draft.build()


def test_a_batch_that_serves_a_rider_takes_it_out_of_its_group() -> None:
    simulation = riding()
    seqs = [add(simulation, i) for i in range(2)]
    for _ in range(3):
        advance(simulation)
    assert [seq.ride for seq in seqs] == [2, 2]
    simulation.scheduler.modes -= {Mode.PIGGYBACK}
    step = advance(simulation)
    assert [row.kind for row in step.rows] == [RowKind.DECODE_CPU] * 2
    assert [seq.num_output for seq in seqs] == [2, 2]
    simulation.scheduler.modes |= {Mode.PIGGYBACK}
    assert stages(advance(simulation)) == {0: 0, 1: 0}
    finish(simulation, *seqs)


def test_the_next_token_starts_before_the_last_one_is_known() -> None:
    simulation = riding()
    seq = add(simulation, 0)
    scheduler = simulation.scheduler
    advance(simulation)
    for _ in range(LAYERS):
        advance(simulation)
    last, first = scheduler.schedule(), scheduler.schedule()
    assert last is not None
    assert first is not None
    assert [(row.stage, row.sample, row.start) for row in last.rows] == [(LAYERS, True, 3)]
    assert [(row.stage, row.sample, row.start) for row in first.rows] == [(0, False, 4)]
    scheduler.update(last, simulation.compute(last))
    scheduler.update(first, simulation.compute(first))
    finish(simulation, seq)


def test_a_rider_that_ends_wastes_one_row_and_frees_its_place_for_the_next() -> None:
    simulation = riding(max_num_seqs=2)
    scheduler = simulation.scheduler
    first, second = add(simulation, 0), add(simulation, 1)
    advance(simulation)
    for _ in range(LAYERS):
        advance(simulation)
    third = add(simulation, 2)
    last, after = scheduler.schedule(), scheduler.schedule()
    assert last is not None
    assert after is not None
    scheduler.update(last, simulation.compute(last))
    scheduler.finish(first)  # its token was a stop token
    assert scheduler.update(after, simulation.compute(after)) == []
    assert scheduler.metrics.num_wasted_rows == 1
    finish(simulation, second, third)


@pytest.mark.parametrize("stage", range(LAYERS + 1))
def test_an_abort_in_mid_wave_frees_everything_when_its_plan_has_reported(stage: int) -> None:
    simulation = riding()
    gone, stays = add(simulation, 0), add(simulation, 1)
    advance(simulation)
    for _ in range(stage):
        advance(simulation)
    step = simulation.scheduler.schedule()
    assert step is not None
    assert stages(step) == {0: stage, 1: stage}
    simulation.scheduler.finish(gone)
    pages = simulation.scheduler.blocks.pages.used
    simulation.scheduler.update(step, simulation.compute(step))
    assert simulation.scheduler.blocks.pages.used < pages
    finish(simulation, stays)


@pytest.mark.parametrize("stage", range(1, LAYERS + 1))
def test_a_void_rider_starts_its_token_again(stage: int) -> None:
    simulation = riding()
    seq = add(simulation, 0)
    advance(simulation)
    for _ in range(stage):
        advance(simulation)
    simulation.void_rate = 1.0
    ahead = simulation.scheduler.schedule()
    assert ahead is not None
    simulation.scheduler.update(ahead, simulation.compute(ahead))
    assert simulation.scheduler.metrics.num_voided_rows == 1
    simulation.void_rate = 0.0
    assert stages(advance(simulation)) == {0: 0}
    finish(simulation, seq)


def test_a_wave_lost_with_the_gpu_worker_is_prefilled_again() -> None:
    simulation = riding()
    seqs = [add(simulation, i) for i in range(2)]
    for _ in range(LAYERS):
        advance(simulation)
    simulation.model = simulation.make_model()
    simulation.scheduler.reset(simulation.make_blocks(32))
    assert all(seq.state is State.WAITING and seq.ride == 0 for seq in seqs)
    finish(simulation, *seqs)


@pytest.mark.parametrize("policy", ["piggyback", BESIDE_GPU, RIDE_CHURN])
@pytest.mark.parametrize("seed", range(3))
def test_traffic_in_waves_ends_with_the_right_tokens(policy: str, seed: int) -> None:
    sizes = Sizes(policy, gpu_blocks=12, cpu_pages=12, layers=2 + seed, ride_capacity=2, budget=16)
    simulation = Simulation(sizes, seed, void_rate=0.05)
    outputs = serve(simulation, random.Random(seed), n_requests=60)
    assert len(outputs) > 20
    assert simulation.is_empty()
    metrics = simulation.scheduler.metrics
    assert metrics.iterations["piggyback"] > 0
    assert metrics.num_cpu_decodes > 0
    if policy == RIDE_CHURN:
        assert min(metrics.num_swap_ins + metrics.num_swap_outs, metrics.num_preemptions) > 0


def test_every_sequence_has_a_place_when_all_of_them_ride() -> None:
    for groups, seqs in ((4, 256), (33, 256), (81, 16), (33, 1000)):
        assert groups * group_capacity(groups, seqs) >= seqs


RIDING = View(
    waiting=(),
    running=Seqs.of(
        (
            SeqView(1, Place.GPU, 5, 4, 3),
            SeqView(2, Place.CPU, 5, 4, 2, ride=2),
            SeqView(3, Place.CPU, 5, 4, 2, ride=1),
            SeqView(4, Place.CPU, 5, 4, 2),
            SeqView(5, Place.CPU, 5, 4, 2),
        )
    ),
    gpu_blocks_free=8,
    gpu_blocks_total=16,
    cpu_pages_free=8,
    cpu_pages_total=16,
    block_size=2,
    page_size=4,
    seats_free=4,
    max_num_batched_tokens=8,
    max_swaps=2,
    enable_chunked_prefill=True,
    cpu_workers=1,
    modes=frozenset(Mode),
    ride_groups=LAYERS + 1,
    ride_capacity=1,
)
GPU_1, CPU_4 = PlanRow(1, RowKind.DECODE_GPU, 1), PlanRow(4, RowKind.DECODE_CPU, 1)


def plan_of(
    riders: tuple[int, ...], *batches: tuple[PlanRow, ...], **moves: tuple[int, ...]
) -> Plan:
    rows = tuple(Rows.of(batch) for batch in batches)
    return Plan(rows, riders=np.array(riders, np.int64), **moves)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of((2, 3), (GPU_1,)),
        plan_of((2, 3, 4), (GPU_1,)),
        plan_of((3,), (GPU_1,), swap_in=(2,)),
        plan_of((3, 4), preempt=(2,)),
        plan_of((), (GPU_1,)),  # the wave stands still
        plan_of((), (CPU_4,)),
    ],
)
def test_plans_that_keep_the_groups_together_pass(plan: Plan) -> None:
    check_plan(plan, RIDING)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        pytest.param(plan_of((2, 4), (GPU_1,)), "left behind", id="one on its way is missing"),
        pytest.param(plan_of((2, 3, 4, 5), (GPU_1,)), "places", id="more than places"),
        pytest.param(plan_of((2, 3), (GPU_1, CPU_4)), "one kind", id="beside CPU decodes"),
        pytest.param(plan_of((2, 3), (GPU_1,), (CPU_4,)), "one kind", id="beside a second batch"),
        pytest.param(plan_of((1, 2, 3)), "stay", id="a GPU-request"),
        pytest.param(plan_of((2, 3), swap_in=(2,)), "stay", id="one that moves away"),
        pytest.param(plan_of((2, 3, 9)), "stay", id="unknown"),
    ],
)
def test_plans_that_break_a_group_are_refused(plan: Plan, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        check_plan(plan, RIDING)


def test_a_worker_without_riders_is_offered_none() -> None:
    simulation = riding("neo", ride_capacity=0)
    assert Mode.PIGGYBACK not in simulation.scheduler.modes
    with pytest.raises(PlanError, match="piggyback"):
        check_plan(plan_of((2, 3), (GPU_1,)), replace(RIDING, modes=RUNNABLE))
