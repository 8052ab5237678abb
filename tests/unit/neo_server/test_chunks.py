"""Chunk sizes: what a prompt token costs, and what waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neo_server.cost_model import CostModel, FreeCost, Load, iteration_time
from neo_server.plan import Place, Seqs, SeqView, View
from neo_server.policies.chunks import cheapest, chunk_limit
from neo_server.policies.draft import Draft
from neo_server.roofline import SHAPES, RooflineCost, load_hardware

SHARP = RooflineCost(load_hardware("g5.4xlarge"), SHAPES["llama-3.1-8b"])
MOST = 2048
ROWS = 16
DECODES = Load(tokens=ROWS, gpu_rows=ROWS, gpu_tokens=ROWS * 1000, sampled=ROWS)


class Rounded(RooflineCost):
    """Arithmetic that begins to cost long before it takes longer than reading the weights."""

    def linear(self, tokens: float) -> float:
        read, arithmetic = self._rates.weights_s, self._rates.linear_s * tokens
        return float((read**4 + arithmetic**4) ** 0.25)


SMOOTH = Rounded(SHARP.hardware, SHARP.model)


def knee_of(cost: RooflineCost) -> float:
    """Tokens whose arithmetic takes as long as the weights."""
    return cost._rates.weights_s / cost._rates.linear_s


def price(cost: CostModel, tokens: int) -> float:
    """Seconds that a prompt token adds."""
    n_new = tokens - ROWS
    chunk = DECODES.with_prefill(n_new, 0, moved=False, last=False)
    return (iteration_time(cost, [chunk]) - iteration_time(cost, [DECODES])) / n_new


def test_where_tokens_are_free_until_the_weights_are_read_a_chunk_ends_there() -> None:
    chosen = cheapest(SHARP, DECODES, MOST, 1)
    assert abs(chosen - knee_of(SHARP)) <= 64


@pytest.mark.parametrize("cost", [SHARP, SMOOTH])
def test_the_more_waits_for_prompts_the_larger_chunks_are(cost: CostModel) -> None:
    sizes = [cheapest(cost, DECODES, MOST, waiting) for waiting in (0, 1, 4, 16, 64, 1000)]
    assert sizes == sorted(sizes)
    assert 2 * sizes[0] < sizes[-1]


def test_a_small_chunk_is_cheaper_by_the_token_and_chosen_while_one_row_waits() -> None:
    chosen = cheapest(SMOOTH, DECODES, MOST, 1)
    assert ROWS < chosen < knee_of(SMOOTH)
    assert price(SMOOTH, chosen) < 0.5 * price(SMOOTH, 512)


class Fetching(Rounded):
    """Earlier chunks cost so many times what a copy of them does."""

    TIMES = 100.0

    def staging(self, tokens: float) -> float:
        return self.TIMES * super().staging(tokens)


DEAR = Fetching(SHARP.hardware, SHARP.model)


def test_the_dearer_earlier_chunks_are_to_fetch_the_fewer_a_prompt_on_the_cpu_has() -> None:
    prompt = 1000
    on_gpu = cheapest(SMOOTH, DECODES, MOST, 1)
    cheap, dear = (cheapest(cost, DECODES, MOST, 1, prompt) for cost in (SMOOTH, DEAR))
    assert on_gpu < cheap < dear
    assert dear - ROWS >= prompt > dear - ROWS - 128  # whole, and hardly room for more
    assert cheapest(DEAR, DECODES, MOST, 1) == on_gpu  # of prompts on the GPU
    assert cheapest(DEAR, DECODES, MOST, 1, 2 * MOST) == MOST  # longer than any chunk


class Attending(Rounded):
    """Prefill attention takes most of the time."""

    def prefill_attn(self, pairs: float) -> float:
        return 100.0 * super().prefill_attn(pairs)


def test_attention_over_a_whole_prompt_takes_as_long_in_chunks_of_any_size() -> None:
    plain, slow = SMOOTH, Attending(SHARP.hardware, SHARP.model)
    on_gpu, on_cpu = ([cheapest(cost, DECODES, MOST, 4, prompt) for cost in (plain, slow)]
                      for prompt in (0, 4000))  # fmt: skip
    assert on_cpu[0] == on_cpu[1]
    assert on_gpu[0] > on_gpu[1]  # nothing is known of those before


def test_what_costs_nothing_is_taken_at_once() -> None:
    assert cheapest(FreeCost(), DECODES, MOST, 1) == MOST


def test_without_decodes_prompts_are_prefilled_at_their_best_rate() -> None:
    chosen = cheapest(SHARP, Load(), MOST, 5)
    rates = {n: n / iteration_time(SHARP, [Load().with_prefill(n, 0, moved=False, last=False)])
             for n in (64, chosen, MOST)}  # fmt: skip
    assert rates[chosen] == max(rates.values())


VIEW = View(
    waiting=(SeqView(99, Place.NOWHERE, 1000, 0, 0),),
    running=Seqs.of(SeqView(i, Place.GPU, 1001, 1000, 64) for i in range(ROWS)),
    gpu_blocks_free=0,
    gpu_blocks_total=1100,
    cpu_pages_free=0,
    cpu_pages_total=4,
    block_size=16,
    page_size=64,
    seats_free=16,
    max_num_batched_tokens=MOST,
    max_swaps=1,
    enable_chunked_prefill=True,
    cpu_workers=0,
)
NONE = VIEW.running.take(slice(0))


def limit_of(view: View, started: Seqs = NONE, more: float = 0.0) -> int:
    return chunk_limit(Draft(view), SMOOTH, DECODES, started, more)


def test_a_cache_with_room_for_many_prompts_is_filled_by_large_chunks() -> None:
    full = limit_of(VIEW)
    waiting = tuple(SeqView(100 + i, Place.NOWHERE, 1000, 0, 0) for i in range(40))
    empty = replace(VIEW, waiting=waiting, gpu_blocks_free=1000)
    assert limit_of(empty) > 2 * full
    assert limit_of(VIEW, more=30.0) > full  # and so is a crowd that decodes on the CPU


def test_long_prompts_with_short_answers_ask_for_more_than_is_cheap() -> None:
    short = replace(VIEW, mean_prompt=1000.0, mean_output=20.0)
    rows = 1100 * 16 / (1000.0 + 10.0)
    assert limit_of(short) >= ROWS + rows * 1000.0 / 20.0 > limit_of(VIEW)
    long = replace(VIEW, mean_prompt=1000.0, mean_output=2000.0)
    assert limit_of(long) == limit_of(VIEW)


class Placed(Rounded):
    """Products take all places of riders where there is one rider."""

    @property
    def ride_places(self) -> float:
        return 24.0


@pytest.mark.parametrize("mean_output", [0.0, 20.0])
def test_a_chunk_and_the_places_of_riders_together_fill_a_products_step(
    mean_output: float,
) -> None:
    cost, rider = (
        Placed(SHARP.hardware, SHARP.model),
        SeqView(50, Place.CPU, 1001, 1000, 16, ride=3),
    )
    lengths = {"mean_prompt": 1000.0, "mean_output": mean_output}
    alone = replace(VIEW, **lengths)
    ridden = replace(alone, running=VIEW.running.plus(Seqs.of([rider])))
    plain, beside = (chunk_limit(Draft(v), cost, DECODES, NONE) for v in (alone, ridden))
    assert plain % 64 == 0
    assert (beside + 24) % 64 == 0
    assert beside > ROWS


def ridden(view: View) -> View:
    rider = SeqView(50, Place.CPU, 1001, 1000, 16, ride=3)
    return replace(view, running=VIEW.running.plus(Seqs.of([rider])))


def test_where_no_step_holds_rows_and_places_a_chunk_takes_the_budget() -> None:
    cost = Placed(SHARP.hardware, SHARP.model)
    full = Load(tokens=40, gpu_rows=40, gpu_tokens=40_000, sampled=40)
    small = ridden(replace(VIEW, max_num_batched_tokens=64))
    assert chunk_limit(Draft(small), cost, full, NONE) == 64
    assert chunk_limit(Draft(small), cost, DECODES, NONE) == 64 - 24


def test_a_target_for_tokens_counts_the_places_of_riders() -> None:
    cost = Placed(SHARP.hardware, SHARP.model)
    slo = 1.015 * iteration_time(cost, [DECODES])
    limit = chunk_limit(Draft(ridden(replace(VIEW, tpot_slo_s=slo))), cost, DECODES, NONE)

    def seconds(tokens: int) -> float:
        beside = replace(DECODES, tokens=ROWS + 24)
        return iteration_time(cost, [beside.with_prefill(tokens, 0, moved=False, last=False)])

    assert limit > ROWS + 1
    assert seconds(limit - ROWS) <= slo < seconds(limit - ROWS + 1)


def test_a_target_for_tokens_bounds_a_chunk_and_whole_prompts_know_none() -> None:
    alone = iteration_time(SMOOTH, [DECODES])
    hurried = replace(VIEW, tpot_slo_s=1.01 * alone)
    assert ROWS < limit_of(hurried) < limit_of(VIEW)
    assert limit_of(replace(VIEW, enable_chunked_prefill=False)) == MOST


def test_a_target_for_tokens_counts_what_a_chunk_on_the_cpu_fetches() -> None:
    hurried = replace(VIEW, tpot_slo_s=1.3 * iteration_time(SMOOTH, [DECODES]))

    def limit(num_computed: int) -> int:
        begun = Seqs.of([SeqView(50, Place.CPU, 2000, num_computed, 32)])
        return chunk_limit(Draft(hurried), SMOOTH, DECODES, begun, cpu_prompt=2000)

    chunk = DECODES.with_prefill(limit(1000) - ROWS, 0, moved=False, last=False)
    chunk.staged = 1000
    assert ROWS + 1 < limit(1000) < limit(1)
    assert iteration_time(SMOOTH, [chunk]) <= 1.3 * iteration_time(SMOOTH, [DECODES])
