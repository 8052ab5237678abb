from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from neo_server.errors import ConfigurationError
from neo_server.plan import Mode
from neo_server.roofline import SHAPES, RooflineCost, load_hardware
from neo_server.simulator.run import ALL_MODES, PAPER_MODES, Report, Setting, Simulation, simulate
from neo_server.simulator.workload import arrivals, read_trace, synthetic
from protos.config import SchedulerConfig


def setting(policy: str, hardware: str = "g5.16xlarge", **changes: object) -> Setting:
    cost = RooflineCost(load_hardware(hardware), SHAPES["llama-3.1-8b"])
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        enable_chunked_prefill=False,
    )
    return replace(Setting(policy, cost, 26_400, 1_000_000, config, PAPER_MODES), **changes)  # type: ignore[arg-type]


def run(policy: str, output: int = 300, **changes: object) -> Report:
    work = arrivals(synthetic(1000, output, 100), None)
    return simulate(setting(policy, **changes), work)  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", ["g5.2xlarge", "g5.16xlarge"])
@pytest.mark.parametrize("output", [50, 300])
def test_neo_is_not_worse_than_the_gpu_alone_nor_than_all_on_the_cpu(
    hardware: str, output: int
) -> None:
    neo = run("neo", output, hardware=hardware).requests_per_s
    assert neo >= 0.98 * run("gpu-only", output, hardware=hardware).requests_per_s
    assert neo >= 0.98 * run("fastdecode-plus", output, hardware=hardware).requests_per_s
    assert neo >= 0.98 * run("symmetric", output, hardware=hardware).requests_per_s


def test_more_cpu_bandwidth_gives_more_throughput() -> None:
    small, large = run("neo", hardware="g5.2xlarge"), run("neo", hardware="g5.16xlarge")
    assert large.requests_per_s > 1.2 * small.requests_per_s


def test_a_hand_off_that_costs_too_much_lets_nothing_be_offloaded() -> None:
    dear = setting("neo")
    hardware = dear.cost.hardware.model_copy(update={"handoff_us": 50_000.0})  # type: ignore[attr-defined]
    dear = replace(dear, cost=replace(dear.cost, hardware=hardware))  # type: ignore[type-var]
    work = arrivals(synthetic(1000, 300, 60), None)
    report = simulate(dear, work)
    base = simulate(setting("gpu-only"), work)
    metrics = report.metrics
    assert metrics.num_cpu_decodes < 0.02 * (metrics.num_cpu_decodes + metrics.num_gpu_decodes)
    assert report.requests_per_s >= 0.98 * base.requests_per_s


def test_a_hand_off_that_costs_nothing_lets_much_be_offloaded() -> None:
    metrics = run("neo", hardware="g5.16xlarge").metrics
    assert metrics.num_cpu_decodes > 0.3 * metrics.num_gpu_decodes


def test_no_cpu_request_is_skipped_longer_than_the_bound() -> None:
    for hardware in ("g5.2xlarge", "g5.16xlarge"):
        report = run("neo", hardware=hardware)
        assert report.metrics.max_skipped <= 32


def test_piggybacking_gives_every_token_after_all_layers() -> None:
    report = run("neo", 300, hardware="g5.2xlarge", modes=ALL_MODES)
    assert report.metrics.iterations[Mode.PIGGYBACK] > 0
    assert all(request.last_s > request.first_s > 0 for request in report.requests)


def test_below_saturation_nothing_is_offloaded() -> None:
    work = arrivals(synthetic(1000, 50, 30), 0.2)
    metrics = simulate(setting("neo"), work).metrics
    assert metrics.num_cpu_decodes == metrics.num_swap_outs == 0


def test_a_wrong_belief_is_corrected_on_the_way() -> None:
    right = setting("neo")
    wrong = replace(right, believed=right.cost.with_cpu_bandwidth(4.0))  # type: ignore[attr-defined]
    work = arrivals(synthetic(1000, 200, 80), None)
    simulation = Simulation(wrong)
    simulation.run(work)
    assert simulation.scheduler.cost.factors["cpu_attn"] > 2.0
    assert simulation.scheduler.cost.median_error < 0.15


def test_where_the_cpu_is_what_counts_neo_is_not_behind_those_that_use_it_alone() -> None:
    """A T4: neither a linear stage nor a wrong idea of T_ca may leave the CPU idle."""
    cost = RooflineCost(load_hardware("g4dn.4xlarge"), SHAPES["llama-2-7b"])
    work = arrivals(synthetic(400, 300, 150, seed=4), None)
    rates = {}
    for policy in ("neo", "symmetric", "fastdecode-plus"):
        config = setting(policy).config.model_copy(update={"max_model_len": 832})
        small = Setting(policy, cost, 864, 97_000, config, PAPER_MODES)
        rates[policy] = simulate(small, work).requests_per_s
    assert rates["neo"] >= max(rates.values())


def chunked(**changes: object) -> Setting:
    base = setting("neo", "g5.4xlarge")
    update = {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048, **changes}
    return replace(base, config=base.config.model_copy(update=update), modes=PAPER_MODES)


def test_parked_requests_do_not_make_chunks_larger() -> None:
    work = arrivals(synthetic(1000, 300, 150), None)
    plain = simulate(chunked(), work).requests_per_s
    further = simulate(replace(chunked(), modes=ALL_MODES - {Mode.PIGGYBACK}), work)
    assert further.requests_per_s >= 0.98 * plain


def test_a_target_for_the_first_token_is_met_more_often_and_none_is_worth_nothing() -> None:
    work = arrivals(synthetic(1500, 500, 60), 0.3)
    target = 0.52

    def met(report: Report) -> int:
        return sum(request.ttft_s <= target for request in report.requests)

    free, aimed = simulate(chunked(), work), simulate(chunked(ttft_slo_s=target), work)
    assert met(aimed) >= 10 * met(free) > 0
    hopeless = simulate(chunked(ttft_slo_s=1e-3), work)
    assert [r.first_s for r in hopeless.requests] == [r.first_s for r in free.requests]


def test_two_runs_are_the_same() -> None:
    assert run("neo", 50).seconds == run("neo", 50).seconds


def test_both_public_trace_formats_are_read(tmp_path: Path) -> None:
    csv = tmp_path / "trace.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,10,3\nx,20,0\n")
    osc = tmp_path / "trace.json"
    osc.write_text('[{"prompt": 7, "max_tokens": 2}, {"prompt": [1, 2], "max_tokens": 5}]')
    assert read_trace(csv) == [(10, 3)]
    assert read_trace(osc) == [(7, 2), (2, 5)]
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(ConfigurationError, match="no request"):
        read_trace(csv)
