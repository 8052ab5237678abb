from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from neo_server.correction import BOUND, FACTORS, CorrectedCost
from neo_server.cost_model import (
    CostModel,
    FreeCost,
    Load,
    Ride,
    Stages,
    iteration_time,
    joined,
    layer_time,
)
from neo_server.errors import ConfigurationError
from neo_server.roofline import SHAPES, RooflineCost, gpu_cache_tokens, load_hardware
from neo_server.simulator.run import stage_times
from neo_server.step import StageTimes, StepResult
from neo_server.step_cost import StepLoad
from neo_server.table_cost import Curve, ProfileTable, Surface, TableCost

A10G = RooflineCost(load_hardware("g5.4xlarge"), SHAPES["llama-3.1-8b"])


def test_two_sub_batches_hide_either_side_and_read_the_weights_twice() -> None:
    gpu, cpu = Stages(2.0, 1.0, 0.0, 0.0), Stages(2.0, 0.0, 3.0, 0.5)
    assert layer_time([gpu]) == 3.0
    assert layer_time([gpu, cpu]) == 5.5  # bound by the GPU; and by batch-1's own chain
    assert layer_time([gpu, Stages(2.0, 0.0, 9.0, 0.5)]) == 11.5
    assert layer_time([Stages(2.0, 1.0, 4.0, 0.5)]) == 6.5  # one batch hides in attention only


def test_the_cache_that_is_left_on_an_a10g_is_the_papers() -> None:
    tokens = gpu_cache_tokens(A10G.hardware, A10G.model)
    assert tokens == pytest.approx(26_400, rel=0.05)


def test_every_figure_of_a_hardware_profile_has_a_source() -> None:
    for name in ("g4dn.4xlarge", "g5.2xlarge", "g5.16xlarge", "2xh100", "2xa10g"):
        hardware = load_hardware(name)
        figures = {"gpu_tflops", "gpu_bandwidth_gbs", "gpu_memory_gb", "cpu_bandwidth_gbs"}
        assert figures <= hardware.sources.keys()
    with pytest.raises(ConfigurationError, match="known are"):
        load_hardware("abacus")


def test_riders_cost_only_what_the_iteration_cannot_hide() -> None:
    base = Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24)
    alone = iteration_time(A10G, [base])
    few = iteration_time(A10G, [base], Ride.spread(8, 8_000, 33, 8))
    many = iteration_time(A10G, [base], Ride.spread(4000, 4_000_000, 33, 128))
    assert alone < few < 1.05 * alone
    assert many > 2 * alone


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_later_chunk_on_the_cpu_waits_for_the_chunks_before_it_and_no_other_does(
    overlaps: bool,
) -> None:
    cost = FreeCost(num_layers=4, moved_s_per_token=1e-6)
    cost.overlaps_transfers = overlaps
    base = Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24)

    def seconds(start: int, *, moved: bool) -> float:
        return iteration_time(cost, [base.with_prefill(64, start, moved=moved, last=False)])

    first, later = (seconds(start, moved=True) for start in (0, 512))
    on_gpu = seconds(512, moved=False) - seconds(0, moved=False)  # more pairs
    assert later - first == pytest.approx(on_gpu + 4 * cost.staging(512))
    assert cost.staging(512) > on_gpu


def test_what_a_chunk_fetches_hides_attention_on_the_cpu() -> None:
    """It stands in the place of attention on the GPU, which runs beside that on the CPU."""
    chunk = Load().with_prefill(64, 512, moved=True, last=False)
    cost = FreeCost(cpu_s_per_token=1e-6, moved_s_per_token=1e-6)
    few, many = (chunk.with_cpu(1, tokens) for tokens in (400, 600))
    assert iteration_time(cost, [few]) == pytest.approx(iteration_time(cost, [chunk]), rel=1e-6)
    assert iteration_time(cost, [many]) > 1.05 * iteration_time(cost, [chunk])


def table(**changes: object) -> ProfileTable:
    line = {"x": [1, 3], "seconds": [1.0, 2.0]}
    fields = {
        "key": {
            "model": "m", "gpu": "cpu", "cpu": "c", "torch_threads": 1, "cpu_attn_threads": 2,
            "tp": 1, "dtype": "float32", "kv_dtype": "float32", "max_num_batched_tokens": 8,
        },
        "num_layers": 2,
        "overlaps_transfers": False,
        **dict.fromkeys(("linear", "prefill_attn", "handoff", "transfer", "head"), line),
        "gpu_attn": {"rows": [1, 2], "tokens_per_row": [10, 20], "seconds": [[1, 2], [2, 4]]},
        "cpu_attn": {"rows": [1, 2], "tokens_per_row": [10, 20], "seconds": [[1, 2], [2, 4]]},
    }  # fmt: skip
    return ProfileTable.model_validate({**fields, **changes})


def test_tables_are_interpolated_linearly_in_both_directions_and_beyond_their_end() -> None:
    curve = Curve(x=(1, 3), seconds=(1.0, 2.0))
    assert [curve.at(x) for x in (0, 1, 2, 3, 5)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    surface = Surface(rows=(1, 2), tokens_per_row=(10, 20), seconds=((1, 2), (2, 4)))
    assert surface.at(1, 15) == 1.5
    assert surface.at(2, 30) == 3.0
    assert surface.at(3, 60) == 6.0
    with pytest.raises(ValueError, match="growing"):
        Curve(x=(3, 1), seconds=(1.0, 2.0))


def test_riders_are_charged_what_was_measured_for_them_and_empty_groups_too() -> None:
    base, ride = Load(tokens=4, gpu_rows=2, gpu_tokens=20), Ride(6, 1, 3, 3, 0)
    plain, measured = (
        TableCost(table()),
        TableCost(table(ride_handoff={"x": [0, 1, 5], "seconds": [0.25, 0.5, 0.7]})),
    )
    alone = iteration_time(plain, joined(plain, [base], ride))
    assert iteration_time(plain, [base], ride) - alone == pytest.approx(plain.handoff(3))
    assert iteration_time(measured, [base], ride) - alone == pytest.approx(0.25 + 0.6)
    last = Ride(riders=2, sampled=2)  # all at the last stage, where nothing is handed over
    alone = iteration_time(plain, joined(plain, [base], last))
    assert iteration_time(plain, [base], last) == pytest.approx(alone)
    assert iteration_time(measured, [base], last) - alone == pytest.approx(2 * 0.25)
    stages = StepLoad((base,), ride).stages(measured)
    assert 2 * sum(stage.handoff for stage in stages) == pytest.approx(0.25 + 0.6)
    assert measured.table.num_points == plain.table.num_points + 3


def test_prefills_on_the_cpu_are_charged_what_was_measured_for_their_stores_and_fetches() -> None:
    plain = TableCost(table())
    measured = TableCost(
        table(
            storing={"x": [1, 5], "seconds": [0.1, 0.5]},
            staging={"x": [1, 9], "seconds": [0.01, 0.09]},
        )
    )
    base = Load(tokens=4, gpu_rows=2, gpu_tokens=20)

    def more(cost: TableCost, start: int) -> float:
        """Than the same chunk takes on the GPU, copies aside."""
        on_gpu, on_cpu = (
            iteration_time(cost, [base.with_prefill(3, start, moved=moved, last=False)])
            for moved in (False, True)
        )
        return on_cpu - on_gpu - 2 * cost.transfer(3)

    assert more(plain, 0) == pytest.approx(0.0)
    assert more(measured, 0) == pytest.approx(2 * 0.3)
    assert more(plain, 9) == pytest.approx(2 * plain.transfer(9))
    assert more(measured, 9) == pytest.approx(2 * (0.3 + 0.09))
    assert measured.table.num_points == plain.table.num_points + 4
    believed = CorrectedCost(measured)
    believed.factors["handoff"] = 2.0
    assert believed.storing(3) == pytest.approx(0.6)


@pytest.mark.parametrize("beside", [True, False])
def test_graphs_have_all_places_for_riders(beside: bool) -> None:
    """Which launches one by one, as without CUDA, have not."""
    key = {**table().key.model_dump(), "ride_capacity": 6}
    cost = TableCost(table(overlaps_transfers=beside, key=key))
    ride, base = Ride(riders=3, sampled=1), Load(tokens=4)
    assert cost.ride_places == (6 if beside else 0)
    assert CorrectedCost(cost).ride_places == cost.ride_places
    (joint,) = joined(cost, [base], ride)
    assert joint.tokens == 4 + (6 if beside else 1)
    assert joined(cost, [base], replace(ride, riders=30))[0].tokens == 4 + 10


def test_cpu_attention_follows_the_threads_that_live_and_is_infinite_without_any() -> None:
    alive = [2]
    cost = TableCost(table(), lambda: alive[0])
    whole = cost.cpu_attn(1, 10)
    alive[0] = 1
    cost.refresh()
    assert cost.cpu_attn(1, 10) == 2 * whole
    alive[0] = 0
    cost.refresh()
    assert math.isinf(cost.cpu_attn(1, 10))
    assert math.isinf(TableCost(table(cpu_attn=None)).cpu_attn(1, 10))


def test_answers_that_are_kept_are_kept_until_the_next_refresh() -> None:
    alive, asked = [2], []

    class Base(TableCost):
        def cpu_attn(self, rows: float, tokens: float) -> float:
            asked.append((rows, tokens))
            return super().cpu_attn(rows, tokens)

    cost = CorrectedCost(Base(table(), lambda: alive[0]))
    whole = cost.cpu_attn(1, 10)
    cost.factors["cpu_attn"] = 3.0
    assert cost.cpu_attn(1, 10) == 3 * whole
    assert asked == [(1, 10)]
    alive[0] = 1
    cost.refresh()
    assert cost.cpu_attn(1, 10) == 6 * whole


def test_a_table_with_too_many_points_is_refused_with_both_numbers() -> None:
    many = {"x": list(range(80)), "seconds": [1.0] * 80}
    with pytest.raises(ValueError, match=r"\d+ points; the limit is 60"):
        ProfileTable.parse(table(linear=many).model_dump_json())


@pytest.mark.parametrize("wrong", [4.0, 0.25])
def test_a_profile_that_is_wrong_by_four_is_right_after_some_tens_of_iterations(
    wrong: float,
) -> None:
    truth = TableCost(table())
    believed = CorrectedCost(TableCost(table(), scale=wrong))
    load = StepLoad((Load(tokens=2, gpu_rows=2, gpu_tokens=30, sampled=2),))
    for _ in range(40):
        (stage,) = [Stages.of(truth, batch) for batch in load.batches]
        times = StageTimes((2 * stage.linear, 0.0), (2 * stage.gpu_attn, 0.0), head=truth.head(2))
        elapsed = load.seconds(truth)
        believed.learn(load, load.seconds(believed), StepResult(1, [], [], elapsed, times))
    assert load.seconds(believed) == pytest.approx(load.seconds(truth), rel=0.05)


@pytest.mark.parametrize("wrong", [1.0, 4.0, 0.25])
@pytest.mark.parametrize("split", [(8, 8), (2, 14), (14, 2)])
def test_of_two_sub_batches_that_wait_for_the_cpu_t_ca_is_learned(
    wrong: float, split: tuple[int, int]
) -> None:
    """Either one's wait holds the other's attention too."""
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    believed = CorrectedCost(truth.with_cpu_bandwidth(1 / wrong))
    batches = tuple(Load().with_cpu(rows, rows * 8000.0) for rows in split)
    load = StepLoad(batches)
    for _ in range(60):
        result = StepResult(1, [], [], load.seconds(truth), stage_times(truth, load))
        believed.learn(load, load.seconds(believed), result)
    assert believed.cpu_attn(1, 8000.0) == pytest.approx(truth.cpu_attn(1, 8000.0), rel=0.02)


class Skewed:
    """A cost model whose stages are wrong by different factors."""

    def __init__(self, truth: CostModel, **factors: float) -> None:
        self._truth = truth
        self._factors = factors

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._truth, name)
        factor = self._factors.get(name)
        return value if factor is None else lambda *load: factor * value(*load)


UNTIMED = {
    "chunk": StepLoad((Load(tokens=512, pairs=4e5, sampled=1),)),
    "decodes": StepLoad((Load(tokens=64, gpu_rows=64, gpu_tokens=2.5e5, sampled=64),)),
    "long decodes": StepLoad((Load(tokens=4, gpu_rows=4, gpu_tokens=4e5, sampled=4),)),
    "two batches": StepLoad(tuple(Load().with_cpu(n, n * 8000.0) for n in (6, 10))),
}


def learn_untimed(
    believed: CorrectedCost, truth: RooflineCost, names: Iterable[str], rounds: int
) -> None:
    """Results of a device that says only how long a plan took and how long it waited."""
    for _ in range(rounds):
        for load in (UNTIMED[name] for name in names):
            times = StageTimes(cpu_wait=stage_times(truth, load).cpu_wait)
            result = StepResult(1, [], [], load.seconds(truth), times)
            believed.learn(load, load.seconds(believed), result)


def test_stages_that_nobody_times_are_told_apart_by_iterations_of_different_kinds() -> None:
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    believed = CorrectedCost(Skewed(truth, linear=2.0, gpu_attn=0.4, cpu_attn=3.0))
    learn_untimed(believed, truth, UNTIMED, rounds=150)
    for stage, load in (("linear", (300,)), ("gpu_attn", (8, 4e5)), ("cpu_attn", (8, 64_000.0))):
        found, wanted = (getattr(cost, stage)(*load) for cost in (believed, truth))
        assert found == pytest.approx(wanted, rel=0.1), stage


def test_a_device_that_times_its_stages_tells_what_later_chunks_fetch() -> None:
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    believed = CorrectedCost(Skewed(truth, staging=4.0))
    load = StepLoad((Load().with_prefill(64, 6000, moved=True, last=False),))
    for _ in range(150):
        result = StepResult(1, [], [], load.seconds(truth), stage_times(truth, load))
        believed.learn(load, load.seconds(believed), result)
    assert believed.staging(6000) < 0.5 * 4.0 * truth.staging(6000)
    assert load.seconds(believed) == pytest.approx(load.seconds(truth), rel=0.05)


@pytest.mark.parametrize("wrong", [1.0, 4.0, 0.25])
def test_what_later_chunks_fetch_is_told_by_their_iterations_where_nobody_times_stages(
    wrong: float,
) -> None:
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    base = Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24)
    later = StepLoad((base.with_prefill(128, 2000, moved=True, last=False),))

    def learned(load: StepLoad) -> CorrectedCost:
        believed = CorrectedCost(Skewed(truth, staging=wrong))
        for _ in range(60):
            result = StepResult(1, [], [], load.seconds(truth), StageTimes())
            believed.learn(load, load.seconds(believed), result)
        return believed

    believed = learned(later)
    assert believed.staging(2000) == pytest.approx(truth.staging(2000), rel=0.05)
    assert {believed.factors[name] for name in FACTORS if name != "staging"} == {1.0}
    assert set(learned(replace(later, swaps=True)).factors.values()) == {1.0}


def test_of_little_that_a_chunk_fetches_errors_of_other_stages_tell_nothing() -> None:
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    believed = CorrectedCost(Skewed(truth, linear=0.7))
    little = StepLoad((Load().with_prefill(512, 64, moved=True, last=False),))
    result = StepResult(1, [], [], little.seconds(truth), StageTimes())
    believed.learn(little, little.seconds(believed), result)
    assert believed.factors["staging"] == 1.0


def test_waiting_for_the_cpu_does_not_make_the_device_look_slow() -> None:
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    believed = CorrectedCost(truth.with_cpu_bandwidth(4.0))  # the CPU is slower than believed
    learn_untimed(believed, truth, ["two batches"], rounds=60)
    assert believed.factors["linear"] == pytest.approx(1.0, rel=0.02)
    assert believed.cpu_attn(8, 64_000.0) == pytest.approx(truth.cpu_attn(8, 64_000.0), rel=0.1)


@pytest.mark.parametrize("measured", [True, False])
def test_iterations_that_store_for_the_cpu_tell_t_ca_where_stores_were_measured(
    measured: bool,
) -> None:
    """Where every iteration has a prefill on the CPU there are no others to learn from."""
    storing = {"x": [1, 5], "seconds": [0.01, 0.05]} if measured else None
    truth = TableCost(table(storing=storing, overlaps_transfers=True))
    believed = CorrectedCost(Skewed(truth, cpu_attn=2.0))
    prefills = Load(cpu_rows=2, cpu_tokens=40).with_prefill(2, 0, moved=True, last=True)
    load = StepLoad((prefills, Load(cpu_rows=2, cpu_tokens=40)))
    times = StageTimes(cpu_wait=stage_times(truth, load).cpu_wait)
    for _ in range(60):
        result = StepResult(1, [], [], load.seconds(truth), times)
        believed.learn(load, load.seconds(believed), result)
    wanted = truth.cpu_attn(2, 40) * (1.0 if measured else 2.0)
    assert believed.cpu_attn(2, 40) == pytest.approx(wanted, rel=0.05)


def test_what_batch_0_stores_is_no_part_of_what_hides_batch_1() -> None:
    storing = {"x": [1, 3], "seconds": [2.0, 6.0]}
    truth = TableCost(table(storing=storing, overlaps_transfers=True))
    believed = CorrectedCost(Skewed(truth, cpu_attn=2.0))
    prefills = Load().with_prefill(2, 0, moved=True, last=True)
    load = StepLoad((prefills, Load(tokens=2, cpu_rows=2, cpu_tokens=80)))
    first, second = load.stages(truth)
    assert first.handoff > second.handoff > 0.0 == first.cpu_attn
    times = stage_times(truth, load)
    assert sum(times.cpu_wait) > 0.0
    for _ in range(60):
        result = StepResult(1, [], [], load.seconds(truth), times)
        believed.learn(load, load.seconds(believed), result)
    assert believed.cpu_attn(2, 80) == pytest.approx(truth.cpu_attn(2, 80), rel=0.02)


def test_one_cold_iteration_moves_the_profile_little() -> None:
    cost = CorrectedCost(TableCost(table()))
    load = StepLoad((Load(cpu_rows=1, cpu_tokens=10),))
    seconds = load.seconds(cost)
    times = StageTimes(cpu_wait=(100 * seconds, 0.0))
    cost.learn(load, seconds, StepResult(1, [], [], 101 * seconds, times))
    assert 1.0 < cost.factors["cpu_attn"] < 1.5


def test_late_riders_say_how_slow_the_cpu_is_and_nothing_about_the_device() -> None:
    """Their wait is beside the device's attention, so the rest of the iteration is no sum."""
    truth = RooflineCost(load_hardware("g5.8xlarge"), SHAPES["llama-3.1-8b"])
    believed = CorrectedCost(truth.with_cpu_bandwidth(4.0))
    base = Load(tokens=64, gpu_rows=64, gpu_tokens=2.5e5, sampled=64)
    load = StepLoad((base,), Ride.spread(264, 1e6, 33, 8))
    seconds = load.seconds(truth)
    hidden = truth.num_layers * truth.gpu_attn(64, 2.5e5)
    late = seconds - iteration_time(truth, [base])
    for _ in range(60):
        times = StageTimes(ride_wait=late + hidden)
        believed.learn(load, load.seconds(believed), StepResult(1, [], [], seconds, times))
    assert late > 0.0
    assert {believed.factors[name] for name in ("linear", "gpu_attn", "head")} == {1.0}
    assert believed.factors["cpu_attn"] == 1.0  # of rows of one layer: riders tell nothing
    ride = load.ride.cpu_rows, load.ride.cpu_tokens
    assert believed.ride_attn(*ride) == pytest.approx(truth.ride_attn(*ride), rel=0.25)


def test_corrections_are_bounded() -> None:
    cost = CorrectedCost(FreeCost())
    load = StepLoad((Load(tokens=2, sampled=2),))
    for _ in range(500):
        cost.learn(load, 1.0, StepResult(1, [], [], 1e9, StageTimes((1e9, 0.0))))
    assert cost.factors["linear"] == BOUND
