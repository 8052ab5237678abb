"""Situations in which published schedulers of this kind are known to stop or to crash."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_server.cost_model import FreeCost
from neo_server.policies import POLICIES
from neo_server.request import State
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_scheduler import serve

TWO_CACHES = ["neo", "mixed"]


def finish_all(simulation: Simulation, lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Prompt and output lengths in; outputs to their ends, or a failure after many iterations."""
    scheduler = simulation.scheduler
    sequences = []
    for number, (prompt, output) in enumerate(lengths):
        sequences.append(simulation.sequence(number, list(range(prompt))))
        sequences[-1].max_len = prompt + output
        scheduler.add(sequences[-1])
    for _ in range(2000):
        if not scheduler.has_work:
            break
        step = scheduler.schedule()
        assert step is not None
        for seq, _ in scheduler.update(step, simulation.compute(step)):
            if len(seq.tokens) == seq.max_len:
                scheduler.finish(seq)
    assert not scheduler.has_work, "no end"
    assert simulation.is_empty()
    outputs = [list(seq.tokens[seq.num_prompt :]) for seq in sequences]
    for number, (prompt, output) in enumerate(lengths):
        assert outputs[number] == generate(number, list(range(prompt)), output)
    return outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_longer_than_the_batch_budget_is_cut(policy: str) -> None:
    finish_all(Simulation(Sizes(policy=policy, budget=4, gpu_blocks=16)), [(20, 5), (3, 2)])


@pytest.mark.parametrize("policy", [*TWO_CACHES, "simple-offload", "symmetric", "fastdecode-plus"])
def test_a_cpu_pool_exhausted_by_decode_growth_preempts(policy: str) -> None:
    sizes = Sizes(policy=policy, gpu_blocks=8, cpu_pages=4)
    finish_all(Simulation(sizes), [(4, 12)] * 4)


@pytest.mark.parametrize("policy", TWO_CACHES)
def test_a_lone_sequence_that_outgrows_the_gpu_cache_goes_on(policy: str) -> None:
    finish_all(Simulation(Sizes(policy=policy, gpu_blocks=4, cpu_pages=8)), [(6, 20)])


@pytest.mark.parametrize("policy", POLICIES)
def test_two_requests_that_wait_on_each_other_for_cache_both_end(policy: str) -> None:
    sizes = Sizes(policy=policy, gpu_blocks=9, cpu_pages=5, max_num_seqs=2)
    finish_all(Simulation(sizes), [(8, 9), (8, 9)])


def test_preempted_sequences_come_back_in_arrival_order() -> None:
    simulation = Simulation(Sizes(policy="gpu-only", gpu_blocks=5, max_num_seqs=4, budget=16))
    scheduler = simulation.scheduler
    sequences = [simulation.sequence(i, [1, 2, 3]) for i in range(4)]
    for seq in sequences:
        scheduler.add(seq)
    for _ in range(8):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, simulation.compute(step))
        ids = [seq.id for seq in scheduler.waiting]
        assert ids == sorted(ids)
        running = [seq.id for seq in sequences if seq.state is State.RUNNING]
        assert not ids or max(running) < min(ids)
    assert any(seq.num_preemptions for seq in sequences)


@pytest.mark.parametrize("handoff_s", [0.0, 10.0])
def test_whatever_a_hand_off_costs_everything_ends(handoff_s: float) -> None:
    simulation = Simulation(Sizes(gpu_blocks=8), cost=FreeCost(handoff_s, 1e-9))
    finish_all(simulation, [(4, 8)] * 6)
    offloaded = simulation.scheduler.metrics.num_cpu_decodes > 0
    assert offloaded == (handoff_s == 0.0)


sizes_of = st.builds(
    Sizes,
    policy=st.sampled_from(list(POLICIES)),
    gpu_blocks=st.integers(1, 12),
    cpu_pages=st.integers(1, 8),
    block_size=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([2, 4]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 14),
    max_model_len=st.just(32),
    layers=st.integers(1, 4),
    ride_capacity=st.integers(0, 3),
)


def check_traffic(sizes: Sizes, seed: int, void_rate: float, depth: int, workers: bool) -> None:
    """Everything ends with the right tokens, blocks are conserved, the bound on skips holds."""
    # Copies cost nothing, or so much that whoever is moved had better rest.
    cost = FreeCost(0.0, 10 ** -(seed % 8 + 1), sizes.layers, (1e-12, 1.0)[seed // 8 % 2])
    simulation = Simulation(sizes, seed, void_rate, cost=cost)
    if simulation.scheduler.max_tokens_per_sequence < 2:
        return
    rng = random.Random(seed)
    if workers:  # they come and go
        schedule = simulation.scheduler.schedule

        def flicker() -> object:
            simulation.cpu_workers = rng.choice((0, 1, 2))
            return schedule()

        simulation.scheduler.schedule = flicker  # type: ignore[method-assign, assignment]
    serve(simulation, random.Random(seed), n_requests=6, depth=depth)
    assert simulation.is_empty()
    bound = simulation.scheduler.config.max_skipped_iterations
    assert simulation.scheduler.metrics.max_skipped <= bound


any_traffic = given(
    sizes=sizes_of,
    seed=st.integers(0, 2**32),
    void_rate=st.sampled_from([0.0, 0.2]),
    depth=st.sampled_from([1, 2]),
    workers=st.booleans(),
)


@any_traffic
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_a_thousand_random_traces_keep_every_promise(
    sizes: Sizes, seed: int, void_rate: float, depth: int, workers: bool
) -> None:
    check_traffic(sizes, seed, void_rate, depth, workers)


@pytest.mark.soak
@any_traffic
@settings(max_examples=100_000, deadline=None)
def test_a_hundred_thousand_random_traces_keep_every_promise(
    sizes: Sizes, seed: int, void_rate: float, depth: int, workers: bool
) -> None:
    check_traffic(sizes, seed, void_rate, depth, workers)
