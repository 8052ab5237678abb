"""Whole plans against transformers: every row kind, one and two sub-batches, swaps, voids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.plan_check import UNKNOWN_TOKEN
from neo_native import RowKind, RowStatus, SwapKind
from protos.config import DType
from tests.helpers.engine_rig import MAX_LEN, Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_reference

TOLERANCE = 5e-5
SLOTS = 6

SIDES = ["fake", "native"]


@pytest.fixture(scope="module", params=["llama2", "llama3.2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return folder, *make_reference(folder, request.param, SLOTS, MAX_LEN)


@pytest.fixture(params=SIDES)
def rig(request: pytest.FixtureRequest, checkpoint: Any) -> Iterator[Rig]:
    if request.param == "fake":
        made = Rig(checkpoint[0], cpu_side=FakeCpuSide())
    else:
        made = Rig(checkpoint[0], workers=2)
    yield made
    made.close()


def check_rows(rig: Rig, checkpoint: Any, *batches: list[Row], outcome: Any) -> None:
    """Every sampled row's logits and greedy token."""
    expected = checkpoint[2]
    rows = [row for batch in batches for row in batch]
    sampled = [row for row in rows if row.sample]
    for logits, row in zip(rig.logits[0] if sampled else (), sampled, strict=True):
        right = expected[row.slot, row.start + len(row.tokens) - 1]
        torch.testing.assert_close(logits, right, atol=TOLERANCE, rtol=0)
    for i, row in enumerate(rows):
        assert outcome.slots[i] == row.slot
        wanted = RowStatus.SAMPLED if row.sample else RowStatus.COMPUTED
        assert outcome.status[i] == wanted
        if not row.sample:
            assert outcome.tokens[i] == -1


class RandomTraffic:
    """Sequences that live on either side, cut into random plans, moved at random."""

    def __init__(self, tokens: list[list[int]], seed: int) -> None:
        self._tokens = tokens
        self._draw = np.random.default_rng(seed)
        self.done = [0] * SLOTS
        self.on_cpu = [bool(self._draw.integers(2)) for _ in range(SLOTS)]

    def plan(self) -> tuple[list[list[Row]], list[tuple[int, SwapKind, int]]]:
        swaps = []
        batches: list[list[Row]] = [[], []]
        for slot in self._draw.permutation(SLOTS):
            slot, start = int(slot), self.done[int(slot)]
            if start and self._draw.random() < 0.25:
                swaps.append((slot, SwapKind.IN if self.on_cpu[slot] else SwapKind.OUT, start))
                self.on_cpu[slot] = not self.on_cpu[slot]
            if self._draw.random() < 0.8 and start < MAX_LEN:
                batches[int(self._draw.integers(2))].append(self._row(slot, start))
        ordered = [sorted(batch, key=lambda row: row.kind) for batch in batches]
        if not ordered[0]:
            ordered.reverse()
        return ordered, swaps

    def _row(self, slot: int, start: int) -> Row:
        prefill = start < 40
        new = min(int(self._draw.integers(1, 25)), 40 - start) if prefill else 1
        kinds = (RowKind.PREFILL_GPU, RowKind.PREFILL_CPU, RowKind.DECODE_GPU, RowKind.DECODE_CPU)
        self.done[slot] = start + new
        tokens = self._tokens[slot][start : start + new]
        sample = not prefill or bool(self._draw.integers(2))
        return Row(slot, kinds[2 * (not prefill) + self.on_cpu[slot]], start, tokens, sample)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_of_all_kinds_equal_transformers(rig: Rig, checkpoint: Any, seed: int) -> None:
    traffic = RandomTraffic(checkpoint[1], seed)
    kinds = set()
    for _ in range(40):
        batches, swaps = traffic.plan()
        kinds |= {(row.kind, row.start > 0) for batch in batches for row in batch}
        kinds |= {kind for _, kind, _ in swaps}
        outcome = rig.run(*batches, swaps=swaps)
        check_rows(rig, checkpoint, *batches, outcome=outcome)
    later_prefills = {(RowKind.PREFILL_GPU, True), (RowKind.PREFILL_CPU, True)}
    decodes = {(RowKind.DECODE_GPU, True), (RowKind.DECODE_CPU, True)}
    assert kinds >= later_prefills | decodes | {SwapKind.OUT, SwapKind.IN}


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.FLOAT16, 0.03), (DType.BFLOAT16, 0.25)])
def test_half_precision_goes_through_the_cpu_cache_and_back(
    checkpoint: Any, dtype: DType, tolerance: float
) -> None:
    tokens, expected = checkpoint[1:]
    rig = Rig(checkpoint[0], workers=1, dtype=dtype)
    rig.run([Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:20])])
    steps: list[tuple[Row, list[tuple[int, SwapKind, int]]]] = [
        (Row(0, RowKind.PREFILL_CPU, 20, tokens[0][20:40]), []),
        (Row(0, RowKind.DECODE_CPU, 40, tokens[0][40:41]), []),
        (Row(0, RowKind.DECODE_GPU, 41, tokens[0][41:42]), [(0, SwapKind.IN, 41)]),
        (Row(0, RowKind.DECODE_CPU, 42, tokens[0][42:43]), [(0, SwapKind.OUT, 42)]),
    ]
    for row, swaps in steps:
        rig.run([row], swaps=swaps)
        right = expected[0, row.start + len(row.tokens) - 1]
        torch.testing.assert_close(rig.logits[0][0], right, atol=tolerance, rtol=0)
    rig.close()


def test_blocks_freed_by_a_swap_out_serve_another_row_of_the_same_plan(
    rig: Rig, checkpoint: Any
) -> None:
    tokens = checkpoint[1]
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:30])])
    rig.sequences.block_table[1] = rig.sequences.block_table[0]
    batch = [
        Row(1, RowKind.PREFILL_GPU, 0, tokens[1][:50]),
        Row(0, RowKind.DECODE_CPU, 30, tokens[0][30:31]),
    ]
    outcome = rig.run(batch, swaps=[(0, SwapKind.OUT, 30)])
    check_rows(rig, checkpoint, batch, outcome=outcome)
    batch = [
        Row(1, RowKind.DECODE_GPU, 50, tokens[1][50:51]),
        Row(0, RowKind.DECODE_CPU, 31, tokens[0][31:32]),
    ]
    check_rows(rig, checkpoint, batch, outcome=rig.run(batch))


def test_a_swap_in_may_use_what_a_swap_out_of_the_same_plan_frees(
    rig: Rig, checkpoint: Any
) -> None:
    tokens = checkpoint[1]
    rig.run(
        [
            Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:30]),
            Row(1, RowKind.PREFILL_CPU, 0, tokens[1][:25]),
        ]
    )
    rig.sequences.block_table[1] = rig.sequences.block_table[0]
    batch = [
        Row(1, RowKind.DECODE_GPU, 25, tokens[1][25:26]),
        Row(0, RowKind.DECODE_CPU, 30, tokens[0][30:31]),
    ]
    swaps = [(1, SwapKind.IN, 25), (0, SwapKind.OUT, 30)]
    check_rows(rig, checkpoint, batch, outcome=rig.run(batch, swaps=swaps))


def test_a_plan_of_swaps_alone_moves_them(rig: Rig, checkpoint: Any) -> None:
    tokens = checkpoint[1]
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:30])])
    assert len(rig.run([], swaps=[(0, SwapKind.OUT, 30)]).slots) == 0
    batch = [Row(0, RowKind.DECODE_CPU, 30, tokens[0][30:31])]
    check_rows(rig, checkpoint, batch, outcome=rig.run(batch))


def test_each_sub_batch_waits_only_for_its_own_rows(checkpoint: Any) -> None:
    side = FakeCpuSide()
    rig = Rig(checkpoint[0], cpu_side=side)
    tokens = checkpoint[1]
    rig.run([Row(slot, RowKind.PREFILL_CPU, 0, tokens[slot][:9]) for slot in (0, 1)])
    side.events.clear()
    batches = [[Row(slot, RowKind.DECODE_CPU, 9, tokens[slot][9:10])] for slot in (0, 1)]
    rig.run(*batches)
    assert side.events == [
        ("publish", 0, 0),
        ("publish", 1, 0),
        ("wait", 0, 0),
        ("publish", 0, 1),
        ("wait", 1, 0),
        ("publish", 1, 1),
        ("wait", 0, 1),
        ("publish", 0, 2),
        ("wait", 1, 1),
        ("publish", 1, 2),
        ("wait", 0, 2),
        ("wait", 1, 2),
    ]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_abandoned_channel_voids_its_cpu_rows_alone(checkpoint: Any, layer: int) -> None:
    tokens, expected = checkpoint[1:]
    side = FakeCpuSide()
    rig = Rig(checkpoint[0], cpu_side=side)
    rig.run([Row(s, RowKind.PREFILL_CPU, 0, tokens[s][:9]) for s in (0, 1, 2)])
    rig.run([Row(3, RowKind.PREFILL_GPU, 0, tokens[3][:9])])
    first = [
        Row(3, RowKind.DECODE_GPU, 9, tokens[3][9:10]),
        Row(0, RowKind.DECODE_CPU, 9, tokens[0][9:10]),
        Row(1, RowKind.DECODE_CPU, 9, tokens[1][9:10]),
    ]
    second = [Row(2, RowKind.DECODE_CPU, 9, tokens[2][9:10])]
    side._never_done_from = (0, layer)
    outcome = rig.run(first, second)
    assert outcome.status.tolist() == [
        RowStatus.SAMPLED,
        RowStatus.VOIDED,
        RowStatus.VOIDED,
        RowStatus.SAMPLED,
    ]
    assert outcome.tokens[1] == outcome.tokens[2] == -1
    for row, slot in ((0, 3), (3, 2)):
        torch.testing.assert_close(rig.logits[0][row], expected[slot, 9], atol=TOLERANCE, rtol=0)
    side._never_done_from = None
    again = rig.run(first[1:])
    check_rows(rig, checkpoint, first[1:], outcome=again)


def test_without_any_cpu_worker_the_rows_are_void_after_the_timeout(checkpoint: Any) -> None:
    tokens = checkpoint[1]
    rig = Rig(checkpoint[0], workers=0, timeout_s=0.05)
    rig.run([Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:9])])
    batch = [Row(0, RowKind.DECODE_CPU, 9, tokens[0][9:10])]
    for _ in range(3):
        assert rig.run(batch).status.tolist() == [RowStatus.VOIDED]


@pytest.mark.parametrize("kind", [RowKind.DECODE_GPU, RowKind.DECODE_CPU])
def test_a_token_that_is_not_known_is_the_last_that_its_slot_sampled(
    rig: Rig, checkpoint: Any, kind: RowKind
) -> None:
    """Whatever plans without it came between."""
    tokens = checkpoint[1]
    prefill = RowKind.PREFILL_GPU if kind is RowKind.DECODE_GPU else RowKind.PREFILL_CPU
    prompts = [Row(slot, prefill, 0, tokens[slot][:9]) for slot in (0, 1)]
    sampled = rig.run(prompts).tokens.tolist()
    for position in (9, 10):
        other = rig.run([Row(1, kind, position, [UNKNOWN_TOKEN])])
        assert other.status.tolist() == [RowStatus.SAMPLED]
    unknown = rig.run([Row(0, kind, 9, [UNKNOWN_TOKEN])])
    (logits,) = rig.logits
    assert unknown.status.tolist() == [RowStatus.SAMPLED]
    known = rig.run([Row(0, kind, 9, sampled[:1])])
    torch.testing.assert_close(rig.logits[0], logits, atol=0, rtol=0)
    assert known.tokens.tolist() == unknown.tokens.tolist()


def test_a_token_of_a_void_row_stays_unknown_until_the_slot_samples_again(checkpoint: Any) -> None:
    tokens = checkpoint[1]
    side = FakeCpuSide()
    rig = Rig(checkpoint[0], cpu_side=side)
    rig.run([Row(slot, RowKind.PREFILL_CPU, 0, tokens[slot][:9]) for slot in (0, 1)])
    decode = Row(0, RowKind.DECODE_CPU, 9, tokens[0][9:10])
    side._never_done_from = (0, 1)
    assert rig.run([decode]).status.tolist() == [RowStatus.VOIDED]
    side._never_done_from = None
    rig.run([Row(1, RowKind.DECODE_CPU, 9, tokens[1][9:10])])
    following = [Row(0, RowKind.DECODE_CPU, 10, [UNKNOWN_TOKEN])]
    assert rig.run(following).status.tolist() == [RowStatus.VOIDED]
    rig.run([decode])
    assert rig.run(following).status.tolist() == [RowStatus.SAMPLED]


def test_stage_times_are_parts_of_the_plans(rig: Rig, checkpoint: Any) -> None:
    tokens = checkpoint[1]
    rig.run([Row(0, RowKind.PREFILL_CPU, 0, tokens[0][:9])])
    batches = (
        [Row(1, RowKind.PREFILL_GPU, 0, tokens[1][:60])],
        [Row(0, RowKind.DECODE_CPU, 9, tokens[0][9:10])],
    )
    outcome = rig.run(*batches)
    times = outcome.times
    assert outcome.cpu_tasks >= 3  # one row, three layers
    parts = [times.handoff, times.swap, times.head, *times.linear, *times.gpu_attn, *times.cpu_wait]
    assert min(times.linear) > 0
    assert times.gpu_attn[0] > 0
    assert times.cpu_wait[0] == 0 < times.cpu_wait[1]
    assert sum(parts) <= times.elapsed * (1 + 1e-6)


def test_a_row_that_is_computed_again_draws_the_same_token(checkpoint: Any) -> None:
    """As after a preemption by recompute, or a void."""
    tokens = checkpoint[1]
    rig = Rig(checkpoint[0], cpu_side=FakeCpuSide())
    rig.sequences.params["temperature"] = 2.0
    rig.sequences.params["seed"] = np.arange(8)
    rig.run([Row(s, RowKind.PREFILL_GPU, 0, tokens[s][:20], sample=False) for s in range(SLOTS)])
    decodes = [Row(s, RowKind.DECODE_GPU, 20, tokens[s][20:21]) for s in range(SLOTS)]
    drawn = rig.run(decodes).tokens.tolist()
    assert rig.run(decodes).tokens.tolist() == drawn
    recomputed = [Row(s, RowKind.PREFILL_GPU, 0, tokens[s][:21]) for s in range(SLOTS)]
    assert rig.run(recomputed).tokens.tolist() == drawn
    assert drawn != [int(logits.argmax()) for logits in checkpoint[2][:, 20]]


def test_sampled_tokens_do_not_depend_on_where_and_with_whom_a_row_runs(
    rig: Rig, checkpoint: Any
) -> None:
    """Logits differ in the last bits between kernels; the draw is far from any tie."""
    tokens = checkpoint[1]
    rig.sequences.params["temperature"] = 1.0
    rig.sequences.params["seed"] = np.arange(8) + 100
    drawn = {}
    for kinds in (
        (RowKind.PREFILL_GPU, RowKind.DECODE_GPU),
        (RowKind.PREFILL_CPU, RowKind.DECODE_CPU),
    ):
        rows = [Row(s, kinds[0], 0, tokens[s][:20]) for s in range(4)]
        first = rig.run(rows).tokens.tolist()
        decodes = [Row(s, kinds[1], 20, tokens[s][20:21]) for s in range(4)]
        one = rig.run(decodes).tokens.tolist()
        two = rig.run(decodes[2:], decodes[:2]).tokens.tolist()
        assert two == one[2:] + one[:2]
        drawn[kinds] = first, one
    assert len({repr(tokens) for tokens in drawn.values()}) == 1
