"""Waves in the simulator: an H200 with int8 in the CPU-cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from neo_server.correction import CorrectedCost
from neo_server.cost_model import Load, Ride, iteration_time
from neo_server.plan import Mode
from neo_server.roofline import SHAPES, RooflineCost, load_hardware
from neo_server.simulator.run import ALL_MODES, Report, Setting, Simulation, simulate, stage_times
from neo_server.simulator.workload import arrivals, synthetic
from neo_server.step import StageTimes, StepResult
from neo_server.step_cost import StepLoad
from protos.config import SchedulerConfig

H200 = RooflineCost(load_hardware("h200"), SHAPES["llama-3.1-8b"], kv_scale=0.5)
# Half the CPU: the crowd that keeps it busy is small against the run.
FAST = replace(
    H200,
    hardware=H200.hardware.model_copy(
        update={"handoff_us": 8.0, "cpu_bandwidth_gbs": H200.hardware.cpu_bandwidth_gbs / 2}
    ),
)
WORK = arrivals(synthetic(1000, 300, 120), None)


def run(policy: str = "neo", **changes: object) -> Report:
    modes = changes.pop("modes", ALL_MODES)
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        **changes,  # type: ignore[arg-type]
    )
    return simulate(Setting(policy, FAST, 16_000, 600_000, config, modes), WORK)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def waves() -> Report:
    return run()


@pytest.fixture(scope="module")
def without() -> Report:
    return run(modes=ALL_MODES - {Mode.PIGGYBACK})


def test_riders_add_to_what_the_gpu_does_alone(waves: Report, without: Report) -> None:
    iterations = waves.metrics.iterations
    assert iterations[Mode.PIGGYBACK] > 0.5 * sum(iterations.values())
    assert waves.requests_per_s > without.requests_per_s
    assert waves.requests_per_s > run("gpu-only").requests_per_s


def test_nobody_rides_for_all_its_tokens(waves: Report) -> None:
    """A token of a rider takes 33 iterations; requests move on to the GPU in their turn."""
    iteration = waves.seconds / sum(waves.metrics.iterations.values())
    assert waves.percentile("tpot_s", 99) < 0.5 * 33 * iteration
    assert waves.metrics.num_swap_ins > 0
    assert waves.metrics.max_skipped <= 32


def test_waves_shorten_the_wait_of_all_together(waves: Report, without: Report) -> None:
    assert waves.mean_per_token_s < without.mean_per_token_s
    assert waves.percentile("ttft_s", 50) < without.percentile("ttft_s", 50)


def test_a_target_below_what_a_rider_takes_lets_nobody_ride(waves: Report) -> None:
    metrics = run(tpot_slo_s=0.05).metrics
    assert metrics.iterations[Mode.PIGGYBACK] == 0
    assert waves.metrics.iterations[Mode.PIGGYBACK] > 0


def test_kinds_of_plan_do_not_alternate() -> None:
    config = SchedulerConfig(
        scheduling_policy="neo",
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=2048,
    )
    simulation = Simulation(Setting("neo", FAST, 16_000, 600_000, config, ALL_MODES))
    kinds: list[str] = []
    count = simulation.scheduler.metrics.iterations
    schedule = simulation.scheduler.schedule

    def watched() -> object:
        before = dict(count)
        step = schedule()
        kinds.extend(kind for kind in count if count[kind] > before[kind])
        return step

    simulation.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    simulation.run(WORK)
    switches = sum(one != other for one, other in pairwise(kinds))
    assert switches < 0.05 * len(kinds)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_attention_of_riders_corrects_the_cost_model(factor: float, timed: bool) -> None:
    """Too slow a CPU is seen by its waits, too fast a one by there being none."""
    cost = CorrectedCost(H200.with_cpu_bandwidth(1 / factor))
    real = H200
    ride = Ride.spread(260, 260 * 1000.0, 33, 8)
    load = StepLoad((Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24),), ride)
    for _ in range(100):
        times = stage_times(real, load)
        if not timed:  # a device that tells only how long it waited
            times = StageTimes(cpu_wait=times.cpu_wait, ride_wait=times.ride_wait)
        result = StepResult(1, (), (), load.seconds(real), times)
        cost.learn(load, load.seconds(cost), result)
    rows, tokens = ride.cpu_rows, ride.cpu_tokens
    assert cost.ride_attn(rows, tokens) == pytest.approx(real.ride_attn(rows, tokens), rel=0.25)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_riders_become_as_many_as_the_cpu_serves(factor: float, timed: bool) -> None:
    """No wait says that there could be more, so more are tried until some are late."""
    real, cost = H200, CorrectedCost(H200.with_cpu_bandwidth(factor))
    base = Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24)
    alone, shares, lost = iteration_time(real, [base]), [], 0.0
    for _ in range(1000):
        count = 1
        while cost.ride_attn(count + 1, (count + 1) * 1000.0) <= 0.95 * alone:
            count += 1
        load = StepLoad((base,), Ride.spread(count, count * 1000.0, 33, 16))
        times = stage_times(real, load)
        if not timed:
            times = StageTimes(cpu_wait=times.cpu_wait, ride_wait=times.ride_wait)
        seconds = load.seconds(real)
        lost = 0.95 * lost + 0.05 * times.ride_wait / seconds
        cost.learn(load, load.seconds(cost), StepResult(1, (), (), seconds, times))
        shares.append(real.ride_attn(count, count * 1000.0) / seconds)
    assert min(shares[-100:]) > 0.9
    assert lost < 0.02
