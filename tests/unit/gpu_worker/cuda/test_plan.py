"""Plans as kernels read them, against ``PlanReader`` and against what the rows say one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.cuda.plan import TILE_Q, HostBatch, HostPlan, MetaLayout
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.errors import BadPlanError
from gpu_worker.plan_check import UNKNOWN_TOKEN, PlanLimits
from neo_native import RowKind, SwapKind
from tests.helpers.engine_rig import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_SLOTS,
    MAX_TOKENS,
    PAGE_SIZE,
    Rig,
    Row,
)
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

DECODES = (RowKind.DECODE_GPU, RowKind.DECODE_CPU)
ON_GPU = (RowKind.PREFILL_GPU, RowKind.DECODE_GPU)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    made = Rig(folder, cpu_side=FakeCpuSide())
    params = made.sequences.params
    params["seed"], params["temperature"] = np.arange(MAX_SLOTS), np.linspace(0, 1, MAX_SLOTS)
    yield made
    made.close()


def random_row(rng: np.random.Generator, slot: int, room: int) -> Row:
    kind = RowKind(int(rng.integers(RowKind.DECODE_CPU + 1)))
    if kind in DECODES:
        token = UNKNOWN_TOKEN if rng.random() < 0.3 else int(rng.integers(3, 320))
        return Row(slot, kind, int(rng.integers(MAX_LEN)), [token], bool(rng.random() < 0.9))
    new = int(rng.integers(1, min(MAX_LEN, room) + 1))
    start = int(rng.integers(MAX_LEN - new + 1)) if rng.random() < 0.5 else 0
    return Row(slot, kind, start, rng.integers(3, 320, new).tolist(), bool(rng.random() < 0.7))


def random_batches(rng: np.random.Generator) -> list[list[Row]]:
    """One or two sub-batches, or none but the second; kinds in order within each."""
    slots = rng.permutation(MAX_SLOTS)[: rng.integers(1, MAX_SLOTS + 1)].tolist()
    rows, room = [], MAX_TOKENS - MAX_SLOTS
    for slot in slots:
        rows.append(random_row(rng, slot, max(1, room)))
        room -= len(rows[-1].tokens)
    cut = [len(rows), 0, int(rng.integers(len(rows) + 1))][int(rng.integers(3))]
    return [sorted(part, key=lambda row: row.kind) for part in (rows[:cut], rows[cut:])]


def random_swaps(rng: np.random.Generator) -> list[tuple[int, SwapKind, int]]:
    slots = rng.permutation(MAX_SLOTS)[: rng.integers(4)].tolist()
    return [
        (slot, SwapKind(int(rng.integers(2))), int(rng.integers(MAX_LEN + 1))) for slot in slots
    ]


def fields_of(reader: HostPlanReader, batch: HostBatch) -> dict[str, Any]:
    return {name: batch.meta[f.at : f.at + f.size] for name, f in reader.layout.fields.items()}


def expected_fields(reader: HostPlanReader, rows: list[Row]) -> dict[str, Any]:
    """Every field but those of prefill attention and tables, row by row and token by token."""
    made = {name: np.full(f.size, f.fill, np.int32) for name, f in reader.layout.fields.items()}
    tables = reader._sequences
    n = n_gpu = n_cpu = n_sampled = 0
    for row in rows:
        if row.kind is RowKind.DECODE_GPU:
            made["row_tokens"][n_gpu], made["row_lens"][n_gpu] = n, row.start + 1
            n_gpu += 1
        if row.kind is RowKind.DECODE_CPU:
            made["cpu_tokens"][n_cpu], made["q_rows"][n] = n, n_cpu
            n_cpu += 1
        for i, token in enumerate(row.tokens):
            at = row.start + i
            made["ids"][n], made["positions"][n], made["slots"][n] = token, at, row.slot
            if row.kind in ON_GPU:
                block = int(tables.block_table[row.slot, at // BLOCK_SIZE])
                made["cache_slots"][n] = block * BLOCK_SIZE + at % BLOCK_SIZE
            else:
                made["pages"][n] = tables.page_table[row.slot, at // PAGE_SIZE]
                made["page_rows"][n] = at % PAGE_SIZE
            n += 1
        if row.sample:
            made["sample_tokens"][n_sampled], made["sample_slots"][n_sampled] = n - 1, row.slot
            n_sampled += 1
    made["cpu_count"][0] = n_cpu
    return made


def check_prefills(reader: HostPlanReader, batch: HostBatch, rows: list[Row]) -> None:
    """Tiles cover every new token of every prefill exactly once; tables lead to what is earlier."""
    f = fields_of(reader, batch)
    firsts = np.cumsum([0] + [len(row.tokens) for row in rows])
    by_first = {int(at): row for at, row in zip(firsts, rows, strict=False)}
    ends = [*(chunk.tile_first for chunk in batch.cpu_chunks[1:]), batch.n_tiles]
    of_chunk = {
        tile: chunk
        for chunk, end in zip(batch.cpu_chunks, ends, strict=False)
        for tile in range(chunk.tile_first, end)
    }
    assert (f["tile_rows"][batch.n_tiles :] == -1).all()
    covered = np.zeros(batch.n_tokens, np.int64)
    for tile in range(batch.n_tiles):
        i, first = f["tile_rows"][tile], f["tile_firsts"][tile]
        row = by_first[int(f["prefill_tokens"][i])]
        assert row.kind not in DECODES
        assert (f["prefill_news"][i], f["prefill_starts"][i]) == (len(row.tokens), row.start)
        base = f["prefill_tokens"][i] + first
        covered[base : base + min(TILE_Q, len(row.tokens) - first)] += 1
        staged = row.kind is RowKind.PREFILL_CPU and row.start > 0
        assert staged == (tile in of_chunk)
        if staged:
            assert (of_chunk[tile].slot, of_chunk[tile].start) == (row.slot, row.start)
            assert f["prefill_tables"][i] < 0
        else:
            assert f["prefill_tables"][i] >= 0
        if not staged and row.start > 0:
            at = np.arange(row.start)
            table = batch.meta[reader.layout.tables_at :]
            blocks = table[f["prefill_tables"][i] * f["table_stride"][0] + at // BLOCK_SIZE]
            assert (blocks == reader._sequences.block_table[row.slot, at // BLOCK_SIZE]).all()
    if len(batch.cpu_chunks) == 1:
        (chunk,) = batch.cpu_chunks
        pages = reader._sequences.page_table[chunk.slot, : -(-chunk.start // PAGE_SIZE)]
        assert f["chunk"][: 5 + len(pages)].tolist() == [0, chunk.start, 0, 1, 0, *pages]
    else:
        assert not f["chunk"].any()
    prefilled = np.repeat([row.kind not in DECODES for row in rows], [len(r.tokens) for r in rows])
    assert covered.tolist() == prefilled.astype(int).tolist()


def check_batch(reader: HostPlanReader, batch: HostBatch, sub: Any, rows: list[Row]) -> None:
    assert (batch.channel, batch.rows, batch.n_tokens) == (sub.channel, sub.rows, len(sub.tokens))
    found, wanted = fields_of(reader, batch), expected_fields(reader, rows)
    of_prefill = {name for name in found if name.startswith(("tile_", "prefill_", "chunk"))}
    for name in set(found) - of_prefill - {"table_stride"}:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    check_prefills(reader, batch, rows)
    n = batch.n_tokens
    assert found["ids"][:n].clip(min=0).tolist() == sub.tokens.tolist()
    stores = np.full(n, -1)
    for span, index in sub.stores:
        stores[span] = index.numpy()
    assert found["cache_slots"][:n].tolist() == stores.tolist()
    assert found["sample_tokens"][: batch.n_sampled].tolist() == sub.sampled.tolist()
    check_decodes(reader, batch, sub)
    kinds = [row.kind for row in rows]
    on_cpu = (RowKind.PREFILL_CPU, RowKind.DECODE_CPU)
    assert batch.to_cpu == any(kind in on_cpu for kind in kinds)
    assert batch.decodes_only == all(kind in DECODES for kind in kinds)


def check_decodes(reader: HostPlanReader, batch: HostBatch, sub: Any) -> None:
    f = fields_of(reader, batch)
    stride = int(f["table_stride"][0])
    tables = batch.meta[reader.layout.tables_at : batch.used].reshape(-1, max(1, stride))
    if sub.gpu_decodes is None:
        assert batch.n_gpu_rows == 0
    else:
        table, mask = sub.gpu_decodes.block_table, sub.gpu_decodes.mask
        assert f["row_lens"][: batch.n_gpu_rows].tolist() == mask.sum(dim=(1, 2, 3)).tolist()
        # Columns past a row's end are block 0 in both.
        assert tables[: len(table), : table.shape[1]].tolist() == table.tolist()
        assert (tables[: len(table), table.shape[1] :] == 0).all()
    if sub.cpu_decodes is None:
        assert batch.n_cpu_rows == 0
    else:
        assert batch.cpu_slots.tolist() == sub.cpu_decodes.slots.tolist()
        assert batch.cpu_lens.tolist() == sub.cpu_decodes.seq_lens.tolist()
        assert batch.cpu_lens.dtype == batch.cpu_slots.dtype == np.uint32


def check_swaps(rig: Rig, plan: HostPlan, expected: Any) -> None:
    assert len(plan.swaps) == len(expected.swaps)
    for swap, planned in zip(plan.swaps, expected.swaps, strict=True):
        assert (swap.kind, swap.slot) == (planned.kind, planned.slot)
        at = np.arange(swap.n_tokens)
        index = swap.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        assert index.tolist() == planned.index.tolist()
        pages = rig.sequences.page_table[planned.slot, at // PAGE_SIZE]
        assert swap.pages[at // PAGE_SIZE].tolist() == pages.tolist()
        for entries, size in ((swap.blocks, BLOCK_SIZE), (swap.pages, PAGE_SIZE)):
            assert len(entries) == -(-swap.n_tokens // size)
            assert entries.dtype == np.int32


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_equal_those_of_the_plain_reader(rig: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = random_batches(rng)
    step = rig.step(*batches, swaps=random_swaps(rng))
    reader = HostPlanReader(rig.sequences, rig.limits)
    plan, expected = reader.read(step), rig.reader.read(step)
    assert plan.plan_id == expected.plan_id
    assert plan.slots.tolist() == expected.slots.tolist()
    assert plan.sampled_rows.tolist() == expected.sampled_rows.tolist()
    for name, values in vars(expected.sampling).items():
        np.testing.assert_array_equal(getattr(plan.sampling, name), values, err_msg=name)
    rows = [row for batch in batches for row in batch]
    assert plan.continued.tolist() == [row.tokens[-1] == UNKNOWN_TOKEN for row in rows]
    check_swaps(rig, plan, expected)
    assert len(plan.batches) == len(expected.sub_batches)
    for batch, sub in zip(plan.batches, expected.sub_batches, strict=True):
        check_batch(reader, batch, sub, batches[batch.channel])
    for channel in range(2):
        slots, lens = (pair[channel] for pair in plan.channel_rows())
        wanted_slots, wanted_lens = expected.channel_rows(channel)
        assert slots.tolist() == wanted_slots.tolist()
        assert lens.tolist() == wanted_lens.tolist()


def test_random_plans_have_every_kind_of_row_and_batch() -> None:
    made = [random_batches(np.random.default_rng(seed)) for seed in range(60)]
    kinds = {row.kind for batches in made for batch in batches for row in batch}
    assert kinds == set(RowKind) - {RowKind.RIDE_CPU}
    assert {tuple(bool(batch) for batch in batches) for batches in made} == {
        (True, False), (False, True), (True, True)
    }  # fmt: skip
    rows = [row for batches in made for batch in batches for row in batch]
    assert any(row.kind is RowKind.PREFILL_CPU and row.start for row in rows)
    assert any(len(row.tokens) > TILE_Q for row in rows)


def test_a_plan_is_a_copy_of_its_step(rig: Rig) -> None:
    rows = [Row(0, RowKind.PREFILL_GPU, 8, [5] * 70), Row(1, RowKind.DECODE_CPU, 9, [7])]
    step = rig.step(rows, swaps=[(2, SwapKind.OUT, 20)])
    plan = HostPlanReader(rig.sequences, rig.limits).read(step)
    before = [plan.batches[0].meta[: plan.batches[0].used].copy(), plan.swaps[0].blocks.copy()]
    slots, tables = plan.slots.copy(), rig.sequences.block_table.copy()
    step.tokens[:], step.rows["slot"], rig.sequences.block_table[:] = 9, 3, 1
    try:
        np.testing.assert_array_equal(plan.batches[0].meta[: plan.batches[0].used], before[0])
        np.testing.assert_array_equal(plan.swaps[0].blocks, before[1])
        np.testing.assert_array_equal(plan.slots, slots)
        assert plan.batches[0].cpu_slots.tolist() == [1]
    finally:
        rig.sequences.block_table[:] = tables


def test_the_tokens_of_a_chunk_lie_one_after_the_other_on_the_device(rig: Rig) -> None:
    span = HostPlanReader(rig.sequences, rig.limits).pages_of(3, 37)
    assert (span.kind, span.n_tokens, span.blocks.tolist()) == (SwapKind.IN, 37, [0])
    assert span.pages.tolist() == rig.sequences.page_table[3, : -(-37 // PAGE_SIZE)].tolist()


def test_a_plan_against_the_contract_is_refused(rig: Rig) -> None:
    step = rig.step([Row(0, RowKind.DECODE_GPU, 5, [3]), Row(0, RowKind.DECODE_CPU, 5, [3])])
    with pytest.raises(BadPlanError, match="slot 0 is named twice"):
        HostPlanReader(rig.sequences, rig.limits).read(step)


def limits(max_rows: int, max_tokens: int) -> PlanLimits:
    return PlanLimits(
        max_rows=max_rows, max_tokens=max_tokens, max_swaps=8, max_slots=max_rows, block_size=16,
        max_blocks=64, num_blocks=64, page_size=16, max_pages=64, num_pages=64,
        max_positions=1024, vocab_size=320,
    )  # fmt: skip


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 1), (7, 33), (256, 2048), (300, 8192)])
def test_fields_do_not_overlap_and_epochs_are_aligned(max_rows: int, max_tokens: int) -> None:
    layout = MetaLayout(limits(max_rows, max_tokens))
    spans = sorted((field.at, field.at + field.size) for field in layout.fields.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= layout.tables_at == len(layout.blank)
    assert layout.fields["first_epoch"].at * 4 % 8 == 0
    assert layout.size - layout.tables_at == max_rows * 64


def test_views_lie_where_the_host_writes() -> None:
    layout = MetaLayout(limits(7, 33))
    buffer = torch.arange(layout.size, dtype=torch.int32)
    views = layout.views(buffer)
    assert set(views) == {*layout.fields, "tables"}
    for name, field in layout.fields.items():
        bits = views[name].view(torch.int32)
        assert bits.tolist() == list(range(field.at, field.at + field.size)), name
    assert views["first_epoch"].dtype is torch.int64
    assert len(views["first_epoch"]) == 1
    assert views["tables"].tolist() == list(range(layout.tables_at, layout.size))
