"""A plan that breaks the contract is refused, and the message says how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.errors import BadPlanError
from gpu_worker.plan_check import check_plan
from neo_native import RowKind, SwapKind
from tests.helpers.engine_rig import MAX_LEN, MAX_ROWS, MAX_SLOTS, Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path)
    return path


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder, cpu_side=FakeCpuSide())


ROWS = [
    Row(0, RowKind.PREFILL_GPU, 0, [5] * 20),
    Row(1, RowKind.DECODE_GPU, 30, [6]),
    Row(2, RowKind.DECODE_CPU, 40, [7]),
]


def set_row(row: int, field: str, value: int) -> Callable[[Any, Rig], None]:
    def change(step: Any, _rig: Rig) -> None:
        step.rows[row][field] = value

    return change


def set_header(field: str, value: Any) -> Callable[[Any, Rig], None]:
    def change(step: Any, _rig: Rig) -> None:
        step.header[field] = value

    return change


def set_swap(field: str, value: int) -> Callable[[Any, Rig], None]:
    def change(step: Any, _rig: Rig) -> None:
        step.swaps[0][field] = value

    return change


def set_token(value: int) -> Callable[[Any, Rig], None]:
    def change(step: Any, _rig: Rig) -> None:
        step.tokens[3] = value

    return change


def set_block(_step: Any, rig: Rig) -> None:
    rig.sequences.block_table[1, 2] = 9999


def set_page(_step: Any, rig: Rig) -> None:
    rig.sequences.page_table[2, 1] = 9999


BREAKS: list[tuple[Callable[[Any, Rig], None], str]] = [
    (set_row(1, "slot", MAX_SLOTS), rf"slot is {MAX_SLOTS}; the limit is {MAX_SLOTS - 1}"),
    (set_row(1, "slot", 0), "slot 0 is named twice"),
    (set_row(1, "kind", 4), "kind is 4; the limit is 3"),
    (set_row(2, "kind", RowKind.RIDE_CPU), "kind is 5; the limit is 3"),
    (set_header("n_rows", (2, 0, 1)), "1 riders; this worker takes none"),
    (set_row(0, "kind", RowKind.DECODE_CPU), "not in order"),
    (set_row(0, "n_new", 0), "n_new is 0; the least is 1"),
    (set_row(1, "n_new", 2), "n_new of a decode is 2; the limit is 1"),
    (set_row(1, "start", MAX_LEN), rf"start \+ n_new is {MAX_LEN + 1}; the limit is {MAX_LEN}"),
    (set_row(1, "start", 2**32 - 1), "start of a row is 4294967295"),
    (set_row(0, "token_at", 3), r"token_at \+ n_new is 23; the limit is 22"),
    (set_row(0, "sample", 2), "sample is 2"),
    (set_header("n_tokens", 21), "sum of n_new is 22, expected 21"),
    (set_header("n_rows", (MAX_ROWS, 1, 0)), rf"n_rows is {MAX_ROWS + 1}; the limit is {MAX_ROWS}"),
    (set_header("n_swaps", 9), "n_swaps is 9; the limit is 8"),
    (set_header("rank", 1), "rank is 1, expected 0"),
    (set_token(320), "token is 320; the limit is 319"),
    (set_token(-1), "token is 4294967295"),
    (set_swap("slot", MAX_SLOTS), "swap slot is 8; the limit is 7"),
    (set_swap("kind", 2), "swap kind is 2"),
    (set_swap("n_tokens", MAX_LEN + 1), "swap n_tokens is 129; the limit is 128"),
    (set_block, "block is 9999; the limit is 127"),
    (set_page, "page is 9999; the limit is 63"),
]


@pytest.mark.parametrize(("break_it", "message"), BREAKS)
def test_a_broken_plan_is_refused_with_the_field_and_the_limit(
    rig: Rig, break_it: Callable[[Any, Rig], None], message: str
) -> None:
    step = rig.step(ROWS, swaps=[(3, SwapKind.OUT, 10)])
    break_it(step, rig)
    with pytest.raises(BadPlanError, match=f"plan 1: .*{message}"):
        rig.reader.read(step)


def test_the_plan_they_broke_is_sound(rig: Rig) -> None:
    plan = rig.reader.read(rig.step(ROWS, swaps=[(3, SwapKind.OUT, 10)]))
    assert [sub.channel for sub in plan.sub_batches] == [0]


def test_a_plan_does_not_change_when_the_ring_slot_is_written_again(rig: Rig) -> None:
    step = rig.step(ROWS[:1])
    plan = rig.reader.read(step)
    step.rows[:] = 0
    step.tokens[:] = 0
    step.header["plan_id"] = 99
    assert plan.plan_id == 1
    assert plan.slots.tolist() == [0]
    assert plan.sub_batches[0].tokens.tolist() == [5] * 20


def test_rows_may_name_their_tokens_in_any_order(rig: Rig) -> None:
    step = rig.step(
        [Row(0, RowKind.PREFILL_GPU, 0, [5, 6, 7]), Row(1, RowKind.PREFILL_GPU, 0, [8])]
    )
    step.rows["token_at"][:2] = [1, 0]
    step.tokens[:4] = [8, 5, 6, 7]
    assert rig.reader.read(step).sub_batches[0].tokens.tolist() == [5, 6, 7, 8]


def test_table_entries_past_the_sequence_are_nobodys_business(rig: Rig) -> None:
    rig.sequences.block_table[1, 4:] = 9999
    rig.sequences.page_table[2, 3:] = 9999
    rows = [Row(1, RowKind.DECODE_GPU, 30, [6]), Row(3, RowKind.DECODE_GPU, 90, [6]), ROWS[2]]
    decodes = rig.reader.read(rig.step(rows)).sub_batches[0].gpu_decodes
    assert decodes is not None
    assert decodes.block_table.shape == (2, 12)
    assert decodes.block_table.max() < 128


LAYERS = 3
GROUPS, PLACES = LAYERS + 1, 2  # of the rig with riders
RIDERS = [
    Row(1, RowKind.RIDE_CPU, 30, [6], False, stage=1, place=0),
    Row(2, RowKind.RIDE_CPU, 31, [0], False, stage=1, place=1),
    Row(3, RowKind.RIDE_CPU, 9, [-1], False, stage=0, place=4),
    Row(4, RowKind.RIDE_CPU, 9, [-1], True, stage=LAYERS, place=7),
]


@pytest.fixture
def riding(folder: Path) -> Rig:
    return Rig(folder, cpu_side=FakeCpuSide(), ride_groups=GROUPS, ride_capacity=PLACES)


def test_riders_in_order_are_sound(riding: Rig) -> None:
    check_plan(riding.step(ROWS[:1], riders=RIDERS), riding.sequences, riding.limits)
    check_plan(riding.step(riders=RIDERS), riding.sequences, riding.limits)


@pytest.mark.parametrize(
    ("row", "field", "value", "message"),
    [
        (0, "kind", RowKind.DECODE_CPU, "kind of a rider is 3; the least is 5"),
        (0, "stage", LAYERS + 1, "stage is 4; the limit is 3"),
        (3, "place", GROUPS * PLACES, "place is 8; the limit is 7"),
        (1, "place", 0, r"places \[0, 0, 4, 7\] of riders are not in order"),
        (1, "stage", 2, "riders of one group have stages"),
        (2, "stage", 1, "stage of two groups 1 is named twice"),
        (3, "sample", 0, "sample of riders is"),
        (0, "sample", 1, "sample of riders is"),
        (0, "n_new", 2, "n_new of a decode is 2"),
        (1, "slot", 1, "slot 1 is named twice"),
    ],
)
def test_broken_riders_are_refused(
    riding: Rig, row: int, field: str, value: int, message: str
) -> None:
    step = riding.step(riders=RIDERS)
    step.rows[row][field] = value
    with pytest.raises(BadPlanError, match=message):
        check_plan(step, riding.sequences, riding.limits)


def test_a_riders_page_table_is_checked(riding: Rig) -> None:
    riding.sequences.page_table[2, 1] = 9999
    with pytest.raises(BadPlanError, match="page is 9999"):
        check_plan(riding.step(riders=RIDERS), riding.sequences, riding.limits)
