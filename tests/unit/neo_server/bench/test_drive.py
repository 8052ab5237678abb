from __future__ import annotations

import pytest

from neo_server.bench.drive import drive
from neo_server.bench.workload import prompts_of
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import engine_on


@pytest.mark.parametrize(("policy", "place"), [("gpu-only", "gpu"), ("simple-offload", "cpu")])
async def test_a_record_says_where_its_request_decoded(policy: str, place: str) -> None:
    simulation = Simulation(Sizes(policy=policy, gpu_blocks=64, cpu_pages=64, budget=32))
    async with engine_on(simulation) as engine:
        _, records = await drive(engine, prompts_of([(5, 3), (4, 1), (7, 6)], 50, 0), 0.0)
    steps = {
        "gpu": [r.num_gpu_decodes for r in records],
        "cpu": [r.num_cpu_decodes for r in records],
    }
    assert steps.pop(place) == [2, 0, 5]  # the first token is the prefill's
    assert list(steps.values()) == [[0, 0, 0]]
