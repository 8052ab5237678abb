"""The bound of perfect packing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neo_server.cost_model import Load, iteration_time
from neo_server.plan import Mode
from neo_server.roofline import SHAPES, RooflineCost, load_hardware
from neo_server.simulator.ideal import Packing, ideal_rate
from neo_server.simulator.run import ALL_MODES, PAPER_MODES, Setting, simulate
from neo_server.simulator.workload import Arrival
from protos.config import SchedulerConfig

GPU_ONLY = frozenset((Mode.GPU_ONLY,))
PACKING = Packing(1000, 200, 26_400, 1_000_000, 256, (0.0, 1000.0), GPU_ONLY)


def cost(hardware: str = "g5.8xlarge", bandwidth: float = 1.0) -> RooflineCost:
    model = RooflineCost(load_hardware(hardware), SHAPES["llama-3.1-8b"])
    return model.with_cpu_bandwidth(bandwidth)


def test_on_the_gpu_alone_it_is_what_the_full_cache_decodes_beside_whole_prompts() -> None:
    """By hand: a prompt in one iteration, which decodes too, then decodes alone."""
    rows = 26_400 / 1100
    decode = Load(rows, 0.0, rows, rows * 1100, sampled=rows)
    both = replace(decode, tokens=rows + 1000, pairs=5e5, sampled=rows + 1)
    plain = iteration_time(cost(), [decode])
    seconds = iteration_time(cost(), [both]) + (199 - rows) / rows * plain
    assert ideal_rate(cost(), PACKING) == pytest.approx(1 / seconds)


@pytest.mark.parametrize("policy", ["gpu-only", "neo", "fastdecode-plus"])
@pytest.mark.parametrize("modes", [PAPER_MODES, ALL_MODES])
def test_no_simulation_is_better(policy: str, modes: frozenset[Mode]) -> None:
    packing = replace(PACKING, modes=modes, prefills=(0.0, *(2048 / 2**k for k in range(8))))
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048)
    setting = Setting(policy, cost(), 26_400, 1_000_000, config, modes)
    report = simulate(setting, [Arrival(0.0, 1000, 200)] * 60)
    assert report.requests_per_s < 1.01 * ideal_rate(cost(), packing)


def test_more_plans_and_more_cpu_raise_it_and_the_gpu_alone_does_not_see_the_cpu() -> None:
    two = replace(PACKING, modes=PAPER_MODES)
    everything = replace(PACKING, modes=ALL_MODES)
    rates = [ideal_rate(cost(), p) for p in (PACKING, two, everything)]
    assert rates == sorted(rates)
    assert ideal_rate(cost(bandwidth=4.0), two) > 1.1 * rates[1]
    assert ideal_rate(cost(bandwidth=4.0), PACKING) == rates[0]
