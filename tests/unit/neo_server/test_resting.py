"""Who sits out the plan that moves it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from neo_server.cost_model import CostModel, Load, iteration_time
from neo_server.plan import Mode, Place, Plan, Seqs, SeqView, View
from neo_server.policies import neo
from neo_server.policies.draft import Draft
from neo_server.request import SamplingParams, Sequence
from neo_server.roofline import RooflineCost
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_waves import H200, decode, view


class InLine(RooflineCost):
    """Of a worker that copies between its iterations."""

    @property
    def overlaps_transfers(self) -> bool:
        return False


def with_pcie(gbs: float) -> RooflineCost:
    return replace(H200, hardware=H200.hardware.model_copy(update={"pcie_gbs": gbs}))


def advancing(plan: Plan) -> set[int]:
    return {row.seq for batch in plan.batches for row in batch} | set(plan.riders.tolist())


def returning(view: View, cost: CostModel) -> tuple[bool, bool]:
    """Whether 100 comes back, and whether it advances in the same plan."""
    plan = neo.plan(view, cost)
    others = {number for number in view.running.id.tolist() if number < 24}
    assert advancing(plan) >= others
    return 100 in plan.swap_in, 100 in advancing(plan)


def ample(*cpu: SeqView, **changes: object) -> View:
    return view(*cpu, gpu_blocks_free=400, **changes)


def test_who_comes_back_rests_where_its_copy_costs_more_than_its_token() -> None:
    comes = ample(decode(100, Place.CPU))
    assert returning(comes, H200) == (True, False)
    assert returning(comes, with_pcie(1e6)) == (True, True)


def test_a_worker_that_copies_in_line_gains_nothing_by_rest() -> None:
    in_line = InLine(H200.hardware, H200.model, kv_scale=H200.kv_scale)
    assert returning(ample(decode(100, Place.CPU)), in_line) == (True, True)


def test_the_copy_of_whom_the_last_plan_left_out_ran_beside_that_plan() -> None:
    assert returning(ample(decode(100, Place.CPU, skipped=1)), H200) == (True, True)
    slow = with_pcie(1.0)  # it takes longer than a plan
    assert returning(ample(decode(100, Place.CPU, skipped=1)), slow) == (True, False)


def test_nobody_rests_beyond_the_bound_on_skips() -> None:
    slow, bound = with_pcie(1.0), view().max_skipped
    for skipped, advances in ((bound - 2, False), (bound - 1, True)):
        late = ample(decode(100, Place.CPU, skipped=skipped))
        assert returning(late, slow) == (True, advances)


def test_with_nobody_else_to_advance_it_advances() -> None:
    alone = replace(ample(), running=Seqs.of((decode(100, Place.CPU),)))
    assert returning(alone, with_pcie(1.0)) == (True, True)


def growing(number: int) -> SeqView:
    """Its next token needs a block more."""
    return SeqView(number, Place.GPU, 1009, 1008, 63)


@pytest.mark.parametrize("late", [1, 2, 24])
def test_whose_block_would_come_from_a_departure_rests_with_it(late: int) -> None:
    """Unless that would be too many: then the copy is waited for."""
    running = Seqs.of(tuple(growing(number) for number in range(25)))
    modes = frozenset((Mode.GPU_ONLY, Mode.ONE_BATCH))
    tight = replace(view(modes=modes), running=running, gpu_blocks_free=24 - late)
    plan = neo.plan(tight, H200)
    assert plan.swap_out == (24,)
    stays = 24 if late == 24 else 24 - late
    assert advancing(plan) - {24} == set(range(stays))
    fast = neo.plan(tight, with_pcie(1e6))
    assert advancing(fast) >= set(range(24))


def test_an_iteration_comes_after_the_copies_that_it_waits_for_and_beside_others() -> None:
    load = Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24)
    alone = iteration_time(H200, [load])
    copy = H200.num_layers * H200.transfer(1000)
    assert 0.0 < copy < alone
    assert iteration_time(H200, [replace(load, moved=1000)]) == alone
    awaited = iteration_time(H200, [replace(load, awaited=1000)])
    assert awaited == pytest.approx(alone + copy)
    in_line = InLine(H200.hardware, H200.model, kv_scale=H200.kv_scale)
    both = iteration_time(in_line, [replace(load, moved=1000, awaited=1000)])
    assert both == pytest.approx(alone + 2 * copy)


def late_return(view: View, cost: CostModel) -> Plan:
    """The first on the GPU, the others by way of the CPU; whom a plan moves rests for it."""
    draft = Draft(view)
    for seq in view.waiting:
        draft.admit(seq, Place.CPU if seq.id else Place.GPU, 0)
    gpu = draft.grow(view.running.at(Place.GPU), Place.GPU, draft.preempt)
    draft.decode(gpu, Place.GPU)
    for seq in view.running.at(Place.CPU):
        draft.try_swap(seq, Place.GPU)
    return draft.build()


def test_a_plan_rested_by_who_comes_back_is_a_skip_until_it_advances() -> None:
    simulation = Simulation(Sizes(policy=f"{__name__}:late_return"))
    scheduler = simulation.scheduler
    seqs = [Sequence(i, array("i", (1, 2)), 2, SamplingParams(seed=i)) for i in range(2)]
    for seq in seqs:
        seq.max_len = 8
        scheduler.add(seq)
    skipped = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, simulation.compute(step))
        skipped.append(seqs[1].skipped)
    assert skipped == [0, 1, 0]
    assert scheduler.metrics.max_skipped == 1
