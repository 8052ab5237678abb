"""What ``neo`` weighs as it fills the CPU-cache: full groups, and prompts that must be fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neo_server.cost_model import FreeCost, Load, Ride, iteration_time
from neo_server.plan import Mode, Place, Plan, Seqs, SeqView, View
from neo_server.policies import neo
from neo_server.policies.candidates import Worth
from neo_server.roofline import SHAPES, RooflineCost, load_hardware
from tests.helpers.plan_time import plan_time

H200 = RooflineCost(load_hardware("h200"), SHAPES["llama-3.1-8b"], kv_scale=0.5)


class Fetching(RooflineCost):
    """Earlier chunks cost so many times what a copy of them does."""

    TIMES = 0.0

    def staging(self, tokens: float) -> float:
        return self.TIMES * super().staging(tokens)


class Dear(Fetching):
    TIMES = 200.0


FREE, DEAR = (kind(H200.hardware, H200.model, kv_scale=0.5) for kind in (Fetching, Dear))
GROUPS = H200.num_layers + 1
CAPACITY = 16
DECODES = Load(tokens=24, gpu_rows=24, gpu_tokens=24_000, sampled=24)


def decode(number: int, place: Place, ride: int = 0, skipped: int = 0) -> SeqView:
    held = -(-1000 // (16 if place is Place.GPU else 64))
    return SeqView(number, place, 1000, 999, held, skipped, ride)


def view(*cpu: SeqView, **changes: object) -> View:
    on_gpu = tuple(decode(number, Place.GPU) for number in range(24))
    base = View(
        waiting=(),
        running=Seqs.of(on_gpu + cpu),
        gpu_blocks_free=8,
        gpu_blocks_total=1600,
        cpu_pages_free=4000,
        cpu_pages_total=8000,
        block_size=16,
        page_size=64,
        seats_free=100,
        max_num_batched_tokens=2048,
        max_swaps=8,
        enable_chunked_prefill=True,
        cpu_workers=1,
        modes=frozenset(Mode),
        ride_groups=GROUPS,
        ride_capacity=CAPACITY,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def riding(count: int, stage: int, first: int) -> tuple[SeqView, ...]:
    return tuple(decode(first + i, Place.CPU, ride=stage) for i in range(count))


def riders_of(plan: Plan) -> set[int]:
    assert plan.mode is Mode.PIGGYBACK
    return set(plan.riders.tolist())


def test_attention_of_riders_may_take_the_whole_iteration() -> None:
    few = Ride.spread(160, 0.0, GROUPS, CAPACITY)
    whole = iteration_time(H200, [DECODES], few)
    token = H200.cpu_attn(1, 1)
    within = replace(few, cpu_tokens=0.99 * whole / token)
    beyond = replace(few, cpu_tokens=1.5 * whole / token)
    assert iteration_time(H200, [DECODES], within) == whole
    assert iteration_time(H200, [DECODES], beyond) == pytest.approx(1.5 * whole)


def test_one_that_may_start_waits_for_a_group_that_has_a_place() -> None:
    """A group of its own would cost a hand-off in each iteration."""
    on_way = (*riding(CAPACITY, 20, 100), *riding(CAPACITY, 10, 200), *riding(CAPACITY - 2, 4, 300))
    on_its_way = {seq.id for seq in on_way}
    newcomer = decode(400, Place.CPU)
    assert riders_of(neo.plan(view(*on_way, newcomer), H200)) == on_its_way
    newcomers = tuple(decode(400 + i, Place.CPU) for i in range(6))
    assert riders_of(neo.plan(view(*on_way, *newcomers), H200)) >= {seq.id for seq in newcomers}


def test_nobody_waits_for_a_place_until_it_starves() -> None:
    on_way = (*riding(CAPACITY, 20, 100), *riding(CAPACITY, 10, 200), *riding(CAPACITY - 2, 4, 300))
    late = decode(400, Place.CPU, skipped=view().max_skipped // 2 - 1)
    assert 400 in riders_of(neo.plan(view(*on_way, late), H200))


def test_a_full_group_starts_at_once() -> None:
    on_way = (*riding(4, 20, 100), *riding(4, 10, 200), *riding(4, 4, 300), *riding(4, 2, 350))
    newcomers = tuple(decode(400 + i, Place.CPU) for i in range(CAPACITY))
    chosen = riders_of(neo.plan(view(*on_way, *newcomers), H200))
    assert chosen >= {seq.id for seq in newcomers}


def test_prompts_that_ride_free_below_the_knee_take_nothing_from_a_token() -> None:
    unknown = Worth.of(H200, DECODES, view())
    long_output = Worth.of(H200, DECODES, view(mean_prompt=1000.0, mean_output=400.0))
    short_output = Worth.of(H200, DECODES, view(mean_prompt=1000.0, mean_output=50.0))
    assert long_output.token == pytest.approx(unknown.token, rel=0.01)
    assert 0.0 < short_output.token < 0.8 * unknown.token


def test_prompts_are_prefilled_on_the_cpu_while_gpu_places_get_free() -> None:
    """As many as end meanwhile, and their spread; no more of them than that."""
    waiting = tuple(SeqView(500 + i, Place.NOWHERE, 1000, 0, 0) for i in range(9))
    lengths = {"mean_prompt": 1000.0, "mean_output": 300.0}
    modes = frozenset((Mode.GPU_ONLY, Mode.ONE_BATCH))
    no_offload = view(waiting=waiting, modes=modes, **lengths)
    plan = neo.plan(no_offload, FREE)
    (batch,) = plan.batches
    begun = [row for row in batch if row.seq >= 500]
    assert [row.seq for row in begun] == [500]
    assert Place.of(begun[0].kind) is Place.CPU
    parked = tuple(decode(100 + i, Place.CPU) for i in range(4))
    full = view(*parked, waiting=waiting, modes=modes, **lengths)
    rows = [row for batch in neo.plan(full, FREE).batches for row in batch]
    assert not [row for row in rows if row.seq >= 500]


def admitted(cost: RooflineCost, *prompts: int, **changes: object) -> list[int]:
    """Tokens of each of the prompts that wait which the next iteration takes."""
    waiting = tuple(SeqView(500 + i, Place.NOWHERE, n, 0, 0) for i, n in enumerate(prompts))
    (batch, *_) = neo.plan(view(waiting=waiting, mean_prompt=1000.0, **changes), cost).batches
    tokens: list[int] = batch.n_new[batch.seq >= 500].tolist()
    return tokens


def test_nobody_waits_in_the_cpu_cache_who_fetches_longer_than_a_row_decodes() -> None:
    merged = {"mean_output": 300.0, "modes": frozenset((Mode.GPU_ONLY, Mode.ONE_BATCH))}
    assert 0 < sum(admitted(FREE, 1000, **merged)) < 1000
    assert not admitted(H200, 1000, **merged)
    assert admitted(H200, 20, **merged) == [20]  # in one chunk


def test_a_prompt_whose_chunks_fetch_more_than_its_tokens_are_worth_waits_for_the_gpu() -> None:
    crowd = {"mean_output": 300.0, "seats_free": 230}
    assert 0 < sum(admitted(H200, 1000, max_num_batched_tokens=512, **crowd)) < 512
    assert not admitted(DEAR, 1000, max_num_batched_tokens=512, **crowd)
    assert admitted(DEAR, 1000, **crowd) == [1000]  # in one chunk
    nowhere_else = {"gpu_blocks_total": 62, **crowd}
    assert admitted(DEAR, 1000, max_num_batched_tokens=512, **nowhere_else)


def test_a_prompt_that_has_begun_on_the_cpu_goes_on_in_chunks_by_what_they_fetch() -> None:
    begun = view(SeqView(100, Place.CPU, 1000, 64, 16))
    (little,), (much,) = (neo.plan(begun, cost).batches for cost in (FREE, DEAR))
    assert 0 < little.n_new[little.seq == 100] < much.n_new[much.seq == 100] == 1000 - 64


def test_less_than_half_of_a_prompt_is_not_begun_where_the_next_iteration_takes_it_whole() -> None:
    crowd = {"mean_output": 20.0, "max_num_batched_tokens": 24 + 1100}
    assert admitted(H200, 700, 1000, **crowd) == [700]
    assert admitted(H200, 500, 1000, **crowd) == [500, 600]
    assert admitted(H200, 100, 1000, **crowd) == [100, 1000]
    assert admitted(H200, 700, 2000, **crowd) == [700, 400]  # that is cut in any case


@pytest.mark.parametrize("place", [Place.GPU, Place.CPU])
def test_the_estimate_of_a_plan_counts_what_a_later_chunk_fetches_from_the_cpu_cache(
    place: Place,
) -> None:
    begun = view(SeqView(30, place, 900, 600, 57 if place is Place.GPU else 15))
    dear, free = (FreeCost(num_layers=4, moved_s_per_token=seconds) for seconds in (1e-6, 0.0))
    plan = neo.plan(begun, dear)
    (rows,) = plan.batches
    assert rows.n_new[rows.seq == 30] == 300
    fetched = 600 if place is Place.CPU else 0
    assert plan.estimate_s == pytest.approx(plan_time(dear, plan, begun))
    assert plan.estimate_s - plan_time(free, plan, begun) == pytest.approx(4e-6 * fetched)


@pytest.mark.parametrize(("crowd", "plans"), [(64, [1, 5, 9]), (16, list(range(1, 10)))])
def test_how_many_of_a_crowd_pay_is_asked_every_few_plans(
    crowd: int, plans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    population = neo.population

    def watched(at: View, *others: Any) -> int:
        asked.append(at.plan_id)
        return population(at, *others)

    monkeypatch.setattr(neo, "population", watched)
    waiting = (SeqView(500, Place.NOWHERE, 1000, 0, 0),)
    cpu = tuple(decode(100 + i, Place.CPU) for i in range(crowd))
    kept: dict[str, tuple[int, int]] = {}
    for plan_id in range(1, 10):
        neo.plan(view(*cpu, waiting=waiting, plan_id=plan_id, kept=kept), FREE)
    assert asked == plans


@pytest.mark.parametrize("blocks", [40, 63, 64, 65, 200])
def test_who_comes_back_has_room_beside_what_decodes_grow_by(blocks: int) -> None:
    """Riders relieve: 63 blocks for 1000 tokens, and 2 for 24 decodes."""
    waiting = (SeqView(500, Place.NOWHERE, 1000, 0, 0),)
    on_way = riding(CAPACITY, 2, 100)
    at = view(*on_way, waiting=waiting, gpu_blocks_free=blocks)
    back = len(neo.plan(at, FREE).swap_in)
    assert back == max(0, (blocks - 2) // 63)
