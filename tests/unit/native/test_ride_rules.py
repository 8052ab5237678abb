"""Moves and calls that the rules of riders forbid."""

from __future__ import annotations

import numpy as np
import pytest

import neo_native as nn
from tests.unit.native.rig import NONE, rig
from tests.unit.native.waves import RIDES, TOKENS


def column(*values: int) -> nn.Array:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(4, 0, column(0), column(0), column(5))], "group is 4 with 1 riders; there are 4"),
        ([(0, 0, column(), column(), column())], "group is 0 with 0 riders"),
        ([(0, 1, column(0), column(0), column(5))], "stage of group 0 is 1; it must be 0"),
        ([(1, 2, column(0), column(0), column(5))], "stage of group 1 is 2; it must be 0 or 1"),
        ([(1, 1, column(1), column(0), column(5))], "slot 0 at place 1 of group 1 was not there"),
        ([(1, 1, column(0), column(1), column(5))], "slot 1 at place 0 of group 1 was not there"),
        ([(1, 1, column(0), column(0), column(6))], "slot 0 at place 0 of group 1 was not there"),
        ([(0, 0, column(3), column(0), column(5))], "place is 3; places must grow"),
        ([(0, 0, column(1, 1), column(0, 2), column(5, 5))], "place is 1; places must grow"),
        ([(0, 0, column(0), column(8), column(5))], "slot is 8; it must be below max_slots"),
        ([(0, 0, column(0), column(0), column(0))], "seq_len is 0; it must be from 1"),
        (
            [(0, 0, column(0), column(0), column(5)), (2, 0, column(0), column(2), column(5))],
            "stages must grow",
        ),
    ],
)  # fmt: skip
def test_moves_that_break_the_rules_are_refused(
    moves: list[tuple[int, int, nn.Array, nn.Array, nn.Array]], message: str
) -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        exchange.begin_plan(
            0, (NONE, NONE), (NONE, NONE), [(1, 0, column(0), column(0), column(5))]
        )
        exchange.ride_publish(1, r.queries(1))
        exchange.end_plan()
        with pytest.raises((ValueError, IndexError), match=message):
            exchange.begin_plan(1, (NONE, NONE), (NONE, NONE), moves)
        exchange.begin_plan(1, (NONE, NONE), (NONE, NONE))  # nothing was begun
        exchange.end_plan()


def test_calls_out_of_order_are_refused() -> None:
    with rig(TOKENS, **RIDES) as r:
        exchange = r.exchange()
        exchange.begin_plan(
            0, (NONE, NONE), (NONE, NONE), [(1, 0, column(0), column(0), column(5))]
        )
        with pytest.raises(nn.NativeError, match="group 0 has no riders"):
            exchange.ride_publish(0, r.queries(1))
        with pytest.raises(nn.NativeError, match="wait without a published job"):
            exchange.ride_wait(1, 0.0)
        exchange.ride_publish(1, r.queries(1))
        with pytest.raises(nn.NativeError, match="publishes twice"):
            exchange.ride_publish(1, r.queries(1))
        exchange.end_plan()


def test_without_groups_there_are_no_moves() -> None:
    with rig(TOKENS) as r, pytest.raises(ValueError, match="there are 0 groups"):
        r.exchange().begin_plan(
            0, (NONE, NONE), (NONE, NONE), [(0, 0, column(0), column(0), column(5))]
        )
