from __future__ import annotations

import pytest

from neo_server.block_manager import Pool
from neo_server.metrics import Throughput
from neo_server.plan import Place
from neo_server.request import State
from tests.unit.neo_server.simulation import Simulation, Sizes


def test_a_pool_gives_each_number_once_and_takes_it_back() -> None:
    pool = Pool(4)
    first = pool.take(3)
    assert (sorted(first), pool.free, pool.used) == ([0, 1, 2], 1, 3)
    with pytest.raises(RuntimeError, match="2 wanted, 1 of 4"):
        pool.take(2)
    pool.give(first)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    assert pool.take(0) == []


def test_tables_get_entries_appended_only() -> None:
    simulation = Simulation(Sizes(block_size=2))
    blocks = simulation.scheduler.blocks
    seq = simulation.sequence(0, [1, 2, 3])
    blocks.open_slot(seq)
    blocks.grow(seq, Place.GPU)
    before = simulation.tables.block_table[seq.slot].copy()
    seq.tokens.extend([4, 5])
    blocks.grow(seq, Place.GPU)
    after = simulation.tables.block_table[seq.slot]
    assert (after[:2] == before[:2]).all()
    assert after[:3].tolist() == seq.blocks


def test_a_slot_gets_the_sampling_parameters() -> None:
    simulation = Simulation(Sizes())
    seq = simulation.sequence(2**40 + 1, [1])
    simulation.scheduler.blocks.open_slot(seq)
    row = simulation.tables.params[seq.slot]
    assert (int(row["seed"]), float(row["temperature"]), int(row["top_k"])) == (2**40 + 1, 1.0, 0)


def test_pages_of_a_swap_in_are_free_after_its_plan_but_blocks_of_a_swap_out_at_once() -> None:
    simulation = Simulation(Sizes())
    blocks = simulation.scheduler.blocks
    seq = simulation.sequence(0, [1, 2, 3])
    blocks.open_slot(seq)
    blocks.grow(seq, Place.GPU)
    seq.place = Place.GPU
    blocks.swap_out(seq)
    assert (blocks.blocks.used, blocks.pages.used, seq.place) == (0, 1, Place.CPU)
    blocks.swap_in(seq, plan_id=3)
    assert (blocks.blocks.used, blocks.pages.used, seq.place) == (2, 1, Place.GPU)
    blocks.reported(2)
    assert blocks.pages.used == 1
    blocks.reported(3)
    assert blocks.pages.used == 0


def test_blocks_of_a_swap_out_are_taken_after_all_others() -> None:
    pool = Pool(5)
    first = pool.take(3)
    pool.give_last(first[:2])
    pool.give(first[2:])
    assert pool.take(3) == [first[2], 3, 4]
    assert pool.take(2) == first[:2]


def test_what_is_dropped_waits_for_the_last_plan_that_names_it() -> None:
    simulation = Simulation(Sizes())
    blocks = simulation.scheduler.blocks
    seq = simulation.sequence(0, [1, 2, 3])
    blocks.open_slot(seq)
    blocks.grow(seq, Place.GPU)
    seq.last_plan = 7
    blocks.reported(6)
    blocks.drop(seq, State.FINISHED)
    assert (blocks.blocks.used, blocks.slots.used) == (2, 1)
    blocks.reported(7)
    assert simulation.is_empty()


def test_throughput_is_over_the_last_ten_seconds() -> None:
    now = [100.0]
    throughput = Throughput(lambda: now[0])
    now[0] = 102.0
    throughput.add(10)
    assert throughput.rate() == pytest.approx(5.0)
    now[0] = 111.0
    throughput.add(30)
    assert throughput.rate() == pytest.approx(4.0)
    now[0] = 113.0
    assert throughput.rate() == pytest.approx(3.0)
    now[0] = 200.0
    assert throughput.rate() == 0.0
