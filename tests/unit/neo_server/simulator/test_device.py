from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from neo_native import RowKind, SwapKind
from neo_server.cost_model import FreeCost
from neo_server.plan import Plan
from neo_server.simulator.device import Device
from neo_server.step import Step, StepSwap
from neo_server.step_cost import load_of_step

LAYERS, COPY_S = 2, 0.125  # of a token in one layer
COST = FreeCost(num_layers=LAYERS, moved_s_per_token=COPY_S)


def step(rows: Iterable[int], *swaps: StepSwap, start: int = 4) -> Step:
    """A decode of each slot at position ``start``."""
    slot = np.array(list(rows), np.int64)
    zero, one = np.zeros_like(slot), np.ones_like(slot)
    kind = np.full_like(slot, int(RowKind.DECODE_GPU))
    sizes = (len(slot), 0, 0)
    return Step(
        *(1, sizes, (), slot, kind, zero + start, one, one, zero, zero, zero, swaps, Plan(())),
    )


def device(cost: FreeCost = COST) -> Device:
    """Four blocks of four tokens to a slot."""
    return Device(cost, np.arange(32, dtype=np.uint32).reshape(8, 4), block_size=4)


def length(rows: int) -> float:
    times = device().enqueue(step(range(rows)), 0.0)
    return times.end - times.begin


def test_an_iteration_begins_behind_the_copies_of_its_sequences() -> None:
    swap = StepSwap(1, SwapKind.IN, 4)
    copy = LAYERS * COPY_S * 4
    times = device().enqueue(step((0, 1), swap), 0.0)
    assert times.end == times.reported == pytest.approx(copy + length(2))


def test_a_copy_of_others_runs_beside_and_is_reported_with_its_plan() -> None:
    one = device()
    times = one.enqueue(step((0,), StepSwap(1, SwapKind.IN, 4)), 0.0)
    assert times.end == pytest.approx(length(1))
    assert times.reported == pytest.approx(LAYERS * COPY_S * 4)
    after = one.enqueue(step((0, 1)), times.end)  # it is not through yet
    assert after.end == pytest.approx(times.reported + length(2))
    assert one.waited_s == pytest.approx(times.reported - times.end)


def test_a_copy_begins_once_the_last_iteration_of_its_sequence_is_over() -> None:
    one = device()
    first = one.enqueue(step((0, 1)), 0.0)
    out = one.enqueue(step((0,), StepSwap(1, SwapKind.OUT, 4)), 0.0)
    assert out.reported == pytest.approx(first.end + LAYERS * COPY_S * 4)
    idle = device()
    idle.enqueue(step((0,)), 0.0)
    early = idle.enqueue(step((0,), StepSwap(1, SwapKind.OUT, 4)), 0.0)
    assert early.reported == pytest.approx(LAYERS * COPY_S * 4)


def test_who_stores_into_blocks_of_a_swap_out_waits_for_it() -> None:
    table = np.arange(32, dtype=np.uint32).reshape(8, 4)
    table[0, 1] = table[1, 0]  # given to another already
    one = Device(COST, table, block_size=4)
    swap = StepSwap(1, SwapKind.OUT, 4)
    times = one.enqueue(step((0,), swap, start=4), 0.0)
    assert times.end == pytest.approx(LAYERS * COPY_S * 4 + length(1))
    other = Device(COST, table, block_size=4).enqueue(step((0,), swap, start=8), 0.0)
    assert other.end == pytest.approx(length(1))


def test_copies_of_one_direction_follow_each_other_and_either_direction_has_its_own_lane() -> None:
    one, copy = device(), LAYERS * COPY_S * 4
    first = one.enqueue(step((0,), StepSwap(1, SwapKind.IN, 4)), 0.0)
    assert one.enqueue(step((0,), StepSwap(2, SwapKind.OUT, 4)), 0.0).reported == first.reported
    third = one.enqueue(step((0,), StepSwap(3, SwapKind.IN, 4)), 0.0)
    assert third.reported == pytest.approx(2 * copy)


def test_a_swap_in_waits_for_the_swap_out_whose_block_it_fills() -> None:
    table = np.arange(32, dtype=np.uint32).reshape(8, 4)
    table[2, 0] = table[1, 0]
    swaps = StepSwap(1, SwapKind.OUT, 4), StepSwap(2, SwapKind.IN, 4)
    times = Device(COST, table, block_size=4).enqueue(step((0,), *swaps), 0.0)
    assert times.reported == pytest.approx(2 * LAYERS * COPY_S * 4)


def test_a_step_waits_for_swaps_of_its_own_rows_only() -> None:
    swaps = StepSwap(1, SwapKind.IN, 4), StepSwap(2, SwapKind.OUT, 3)
    (load,) = load_of_step(step((0, 1), *swaps)).batches
    assert (load.awaited, load.moved) == (4, 3)
    (bare,) = load_of_step(step((0, 1), *swaps), swaps=False).batches
    assert [load_of_step(step((0, 1), *s)).swaps for s in (swaps, ())] == [True, False]
    assert (bare.awaited, bare.moved) == (0, 0)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_later_chunk_of_a_cpu_prefill_waits_for_the_tokens_before_it(overlaps: bool) -> None:
    class Fetching(FreeCost):
        def staging(self, tokens: float) -> float:
            return COPY_S * tokens

    cost = Fetching(num_layers=LAYERS)
    cost.overlaps_transfers = overlaps

    def seconds(kind: RowKind, start: int) -> float:
        chunk = step((0,), start=start)
        chunk.kind[:] = int(kind)
        times = device(cost).enqueue(chunk, 0.0)
        return times.end - times.begin

    later, first = (seconds(RowKind.PREFILL_CPU, start) for start in (8, 0))
    on_gpu = seconds(RowKind.PREFILL_GPU, 8) - seconds(RowKind.PREFILL_GPU, 0)
    assert later - first == pytest.approx(LAYERS * COPY_S * 8 + on_gpu)


def test_a_worker_that_copies_in_line_does_one_thing_after_the_other() -> None:
    cost = FreeCost(num_layers=LAYERS, moved_s_per_token=COPY_S)
    cost.overlaps_transfers = False
    times = device(cost).enqueue(step((0,), StepSwap(1, SwapKind.IN, 4)), 0.0)
    assert times.end == times.reported == pytest.approx(LAYERS * COPY_S * 4 + length(1))
