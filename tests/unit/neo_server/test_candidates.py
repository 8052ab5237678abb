"""How many CPU decodes the candidates of ``neo`` put into each sub-batch."""

from __future__ import annotations

import pytest

from neo_server.cost_model import Load, Stages
from neo_server.plan import Mode
from neo_server.policies.candidates import Worth, best
from neo_server.policies.queue import crowd
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
