"""How many CPU decodes the candidates of ``neo`` put into each sub-batch."""

from __future__ import annotations

import pytest

from neo_server.cost_model import Load, Stages
from neo_server.plan import Mode
from neo_server.policies.candidates import Worth, best
from neo_server.policies.queue import Queue, crowd
from neo_server.roofline import SHAPES, RooflineCost, load_hardware
from tests.unit.neo_server.test_waves import view

A10G = load_hardware("g5.4xlarge")
DECODES = Load(tokens=8, gpu_rows=8, gpu_tokens=8000, sampled=8)
MEAN = 1000.0  # tokens of a CPU-request


class Storing(RooflineCost):
    """Prefills on the CPU store in line, so long a token and layer."""

    PER_TOKEN_S = 0.0

    def storing(self, tokens: float) -> float:
        return self.PER_TOKEN_S * tokens


@pytest.mark.parametrize("per_token_s", [0.0, 2e-6, 1e-5])
def test_batch_1_attends_during_all_of_batch_0_its_stores_too(
    per_token_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storing, "PER_TOKEN_S", per_token_s)
    cost = Storing(A10G, SHAPES["llama-3.1-8b"])
    base = DECODES.with_prefill(512, 0, moved=True, last=False)
    state = view(modes=frozenset((Mode.GPU_ONLY, Mode.TWO_BATCHES)))
    choice = best(state, cost, Worth.of(cost, DECODES, state), base, crowd(state, 200, MEAN))
    zero = Stages.of(cost, base)
    assert zero.handoff == pytest.approx(512 * per_token_s)
    batch_0 = zero.linear + zero.gpu_attn + zero.handoff
    fits, more = (cost.cpu_attn(n, n * MEAN) for n in (choice.second, choice.second + 1))
    assert fits <= batch_0 < more


@pytest.mark.parametrize("passed", [0.0, 0.4])
def test_a_batch_pays_for_all_of_the_stages_that_it_throws_away(passed: float) -> None:
    """``passed``: of a token, by each of 20 riders. A few in batches are worth more than a wave."""
    cost = RooflineCost(load_hardware("h200"), SHAPES["llama-2-7b"], kv_scale=0.5)
    state = view(ride_groups=cost.num_layers + 1, ride_capacity=16)
    base = Load(tokens=2, gpu_rows=2, gpu_tokens=800, sampled=2)
    queue = Queue(
        *(20, lambda k: k * 400.0, lambda k: passed * k, 0, 20, 0, 0, lambda k: k * 400.0)
    )
    choice = best(state, cost, Worth.of(cost, base, state), base, queue)
    assert (choice.riders == 20) == (passed > 0)
    assert (choice.first + choice.second > 0) == (passed == 0)
