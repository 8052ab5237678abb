"""The graph that runs a plan holds all of it, and every graph fits the buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.cuda.buckets import (
    MATES,
    MIXED_CPU_ROWS,
    MIXED_PREFILLS,
    MIXED_TOKENS,
    PAIRS,
    Buckets,
    Shape,
    bucket_of,
    buckets,
    decode_shape,
    mixed_buckets,
    pair_buckets,
    ride_buckets,
)
from gpu_worker.cuda.plan import (
    PAD_TOKENS,
    TILE_Q,
    CpuChunk,
    HostBatch,
    HostPlan,
    MetaLayout,
)
from gpu_worker.cuda.rides import HostRides
from gpu_worker.plan_check import PlanLimits
from gpu_worker.sampler import SamplingParams
from protos.config import PLAN_MODES, PlanMode

NONE = np.empty(0, np.uint32)
SAMPLING = SamplingParams(NONE, NONE, NONE, NONE, NONE, NONE)  # of no interest here
RIDERS = 8
RIDES = HostRides((), np.empty(0, np.int32), RIDERS, None, None)  # whoever they are


def batch_of(
    channel: int,
    gpu: int,
    cpu: int,
    prefills: list[int],
    *,
    on_cpu: bool = False,
    sampled_prefills: int = 0,
    chunks: tuple[CpuChunk, ...] = (),
) -> HostBatch:
    """``prefills``: new tokens of each; every decode is sampled."""
    slots = np.arange(cpu, dtype=np.uint32)
    rows = gpu + cpu + len(prefills)
    return HostBatch(
        channel=channel,
        rows=slice(0, rows),
        n_tokens=gpu + cpu + sum(prefills),
        n_gpu_rows=gpu,
        cpu_slots=slots,
        cpu_lens=slots + 1,
        to_cpu=cpu > 0 or (on_cpu and bool(prefills)),
        n_tiles=sum(-(-n // TILE_Q) for n in prefills),
        cpu_chunks=chunks,
        n_sampled=gpu + cpu + sampled_prefills,
        meta=np.empty(0, np.int32),
        used=0,
    )


def plan_of(*batches: HostBatch) -> HostPlan:
    none = np.empty(0, np.intp)
    return HostPlan(0, NONE, batches, (), none, SAMPLING, np.empty(0, np.bool_))


def check_holds(shape: Shape, batch: HostBatch) -> None:
    assert shape.channel == batch.channel
    assert shape.tokens >= batch.n_tokens
    assert shape.gpu_rows >= batch.n_gpu_rows
    assert shape.cpu_rows >= batch.n_cpu_rows
    assert shape.to_cpu or not batch.to_cpu
    assert shape.tiles >= batch.n_tiles
    assert shape.sampled >= batch.n_sampled
    assert len(batch.cpu_chunks) <= 1  # of one the metadata tells
    assert shape.has_chunk or not batch.cpu_chunks


@st.composite
def batches_of(draw: st.DrawFn, channel: int, max_rows: int, max_tokens: int) -> HostBatch:
    gpu = draw(st.integers(0, max_rows))
    cpu = draw(st.integers(0, max_rows - gpu))
    room_rows, room = max_rows - gpu - cpu, max_tokens - gpu - cpu
    prefills: list[int] = []
    for new in draw(st.lists(st.integers(1, 700), max_size=min(room_rows, 40))):
        if sum(prefills) + new <= room:
            prefills.append(new)
    if gpu + cpu + len(prefills) == 0:
        gpu = 1
    sampled = draw(st.integers(0, len(prefills)))
    chunks = ()
    if draw(st.booleans()):
        later = draw(st.integers(0, min(2, len(prefills))))
        tiles = [-(-new // TILE_Q) for new in prefills[:later]]
        chunks = tuple(CpuChunk(0, 8, sum(tiles[:i])) for i in range(later))
    return batch_of(
        channel,
        gpu,
        cpu,
        prefills,
        on_cpu=draw(st.booleans()) or bool(chunks),
        sampled_prefills=sampled,
        chunks=chunks,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Buckets, HostPlan]:
    max_rows = draw(st.sampled_from([1, 7, 8, 64, 100, 256, 300]))
    max_tokens = max_rows + draw(st.sampled_from([0, 60, 512, 4096]))
    made = [draw(batches_of(0, max_rows, max_tokens))]
    if draw(st.booleans()):
        made.append(draw(batches_of(1, max_rows, max_tokens)))
    return Buckets(max_rows, max_tokens), plan_of(*made)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_graph_of_a_plan_holds_every_batch_and_was_captured(
    case: tuple[Buckets, HostPlan],
) -> None:
    chosen, plan = case
    key = chosen.key_of(plan)
    if key is None:
        return
    on_cpu: PlanMode = "one_batch" if plan.batches[0].to_cpu else "gpu_only"
    assert key in set(chosen.keys(("two_batches" if len(plan.batches) > 1 else on_cpu,)))
    for shape, batch in zip(key, plan.batches, strict=True):
        check_holds(shape, batch)


@pytest.mark.parametrize("max_rows", [1, 5, 8, 30, 64, 256, 300])
@pytest.mark.parametrize("cpu", [False, True])
def test_decodes_alone_always_have_a_graph(max_rows: int, cpu: bool) -> None:
    chosen = Buckets(max_rows, max_rows)
    for n in range(1, max_rows + 1):
        cpu_rows = n // 2 + 1 if cpu else 0
        key = chosen.key_of(plan_of(batch_of(0, n - cpu_rows, cpu_rows, [])))
        assert key is not None
        check_holds(key[0], batch_of(0, n - cpu_rows, cpu_rows, []))
        # No smaller bucket would do.
        smaller = [b for b in buckets(max_rows) if n <= b < key[0].tokens]
        assert smaller == []


def test_what_no_graph_runs() -> None:
    chosen = Buckets(256, 8192)
    decodes, prefill = batch_of(0, 8, 0, []), batch_of(0, 8, 0, [100])
    assert chosen.key_of(plan_of(prefill)) is not None
    chunks = (CpuChunk(0, 8, 0), CpuChunk(1, 8, 1))
    chunked = batch_of(0, 8, 0, [50, 50], on_cpu=True, chunks=chunks)
    assert chosen.key_of(plan_of(chunked)) is None
    assert chosen.key_of(plan_of(replace(chunked, cpu_chunks=chunks[:1]))) is not None
    assert chosen.key_of(plan_of(batch_of(0, 0, 0, [MIXED_TOKENS + 1]))) is None
    assert chosen.key_of(plan_of(batch_of(0, 0, MIXED_CPU_ROWS + 1, [64]))) is None
    assert chosen.key_of(plan_of(batch_of(0, 0, 0, [1] * (MIXED_PREFILLS + 2)))) is None
    # Prefills in the second sub-batch, two later chunks, and a second without a first.
    second = batch_of(1, 0, 8, [])
    assert chosen.key_of(plan_of(decodes, batch_of(1, 0, 8, [100]))) is None
    assert chosen.key_of(plan_of(chunked, second)) is None
    assert chosen.key_of(plan_of(second)) is None
    assert chosen.key_of(plan_of(decodes, second)) is not None
    assert chosen.key_of(plan_of()) is None


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("new", [1, 100, 1000, MIXED_TOKENS - 20])
@pytest.mark.parametrize("mates", [1, 64, 65, 256])
def test_prefills_beside_a_second_batch_have_a_graph(on_cpu: bool, new: int, mates: int) -> None:
    chosen = Buckets(256, 2048)
    first = batch_of(0, 12, 8, [new], on_cpu=on_cpu, sampled_prefills=1)
    second = batch_of(1, 0, mates, [])
    key = chosen.key_of(plan_of(first, second))
    assert key is not None
    assert key in set(chosen.keys(PLAN_MODES))
    for shape, batch in zip(key, (first, second), strict=True):
        check_holds(shape, batch)
    assert key[0].tokens - first.n_tokens < max(TILE_Q * 2, first.n_tokens / 4)


def test_bucket_of_takes_the_least_that_holds() -> None:
    assert bucket_of(8, (1, 8, 16)) == 8
    assert bucket_of(9, (1, 8, 16)) == 16
    assert bucket_of(17, (1, 8, 16)) is None


@pytest.mark.parametrize("most", [1, 3, 8, 65, 129, 256, 1000, 4096])
def test_buckets_grow_and_reach_the_most(most: int) -> None:
    mixed = min(most, MIXED_TOKENS)
    for made, last in (
        (buckets(most), most),
        (mixed_buckets(most), mixed),
        (pair_buckets(most), mixed),
    ):
        assert made == sorted(set(made))
        assert made[-1] >= last
        assert len(made) == 1 or made[-2] < last


DECODES, MIXED = 19, 31  # 64 tokens need no graph of 256 decode rows


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("gpu_only", {(1, False, False): DECODES, (1, False, True): MIXED}),
        ("one_batch", {(1, True, False): DECODES, (1, True, True): MIXED}),
        ("two_batches", {(2, True, False): len(PAIRS) ** 2, (2, True, True): 48}),
        (
            "piggyback",
            # One size more: places and a full budget are more than any product's step.
            {(1, False, False): DECODES, (1, False, True): MIXED + 2, (1, True, True): MIXED + 2},
        ),
    ],
)
def test_how_many_graphs_there_are(mode: PlanMode, wanted: dict[Any, int]) -> None:
    """With the default limits: decodes, prefills by 64 and 256 decode rows, pairs of batches."""
    assert len(buckets(256)) == DECODES
    assert 2 * len(mixed_buckets(2048)) == MIXED + 1
    assert 2 * len(pair_buckets(2048)) * len(MATES) == 48
    keys = list(Buckets(256, 2048, RIDERS).keys((mode,)))
    assert len(keys) == len(set(keys))
    assert Counter((len(key), key[0].to_cpu, key[0].tiles > 0) for key in keys) == wanted
    assert all((key[0].lead == RIDERS) == (mode == "piggyback") for key in keys)


@pytest.mark.parametrize("max_rows", [1, 64, 65, 256, 300])
def test_every_graph_beside_prefills_is_some_plans(max_rows: int) -> None:
    """As many of the decode rows that it has places for as leave a token for a prefill."""
    chosen = Buckets(max_rows, 2048)
    keys = {key for key in chosen.keys(("gpu_only",)) if key[0].tiles}
    for (shape,) in keys:
        for rows in range(min(shape.gpu_rows, max_rows, shape.tokens) + 1):
            room = shape.tokens - rows
            batch = batch_of(0, rows, 0, [room] if room else [])
            if not room:  # an unsampled decode
                batch = replace(batch, n_sampled=rows - 1)
            if chosen.key_of(plan_of(batch)) == (shape,):
                break
        else:
            pytest.fail(f"no plan has {shape}")


@pytest.mark.parametrize("max_rows", [1, 4, 8, 15, 16, 64, 256, 300])
@pytest.mark.parametrize("more", [0, 1, 500, 2048, 8192])
@pytest.mark.parametrize("riders", [0, RIDERS])
def test_every_graph_fits_metadata_and_buffers(max_rows: int, more: int, riders: int) -> None:
    max_tokens = max_rows + more
    limits = PlanLimits(
        max_rows=max_rows, max_tokens=max_tokens, max_swaps=8, max_slots=max_rows, block_size=16,
        max_blocks=8, num_blocks=8, page_size=16, max_pages=8, num_pages=8, max_positions=128,
        vocab_size=320, ride_groups=4 if riders else 0, ride_capacity=riders,
    )  # fmt: skip
    size = {name: field.size for name, field in MetaLayout(limits).fields.items()}
    for key in Buckets(max_rows, max_tokens, riders).keys(PLAN_MODES):
        for shape in key:
            assert shape.tokens <= size["ids"] == max_tokens + PAD_TOKENS + riders
            assert shape.tiles <= size["tile_rows"] == size["tile_firsts"], shape
            assert shape.gpu_rows <= size["row_lens"] == size["row_tokens"]
            assert shape.cpu_rows <= size["cpu_tokens"]
            assert 2 * shape.cpu_rows <= size["cpu_tasks"]
            assert shape.sampled <= size["sample_tokens"] == max_rows + PAD_TOKENS + riders


def riding(batch: HostBatch, sampled: int) -> HostPlan:
    """A plan with riders before the batch's rows, some of whom are sampled from."""
    batch = replace(batch, lead=RIDERS, n_ride_sampled=sampled, n_sampled=batch.n_sampled + sampled)
    return replace(plan_of(batch), rides=RIDES)


@settings(max_examples=100, deadline=None)
@given(batches_of(0, 64, 700), st.integers(0, RIDERS))
def test_the_graph_of_a_plan_with_riders_has_their_places(batch: HostBatch, sampled: int) -> None:
    chosen, plan = Buckets(64, 700, RIDERS), riding(batch, sampled)
    key, without = chosen.key_of(plan), chosen.key_of(plan_of(batch))
    assert (key is None) == (without is None or batch.n_cpu_rows > 0)
    if key is None:
        return
    assert key in set(chosen.keys(PLAN_MODES))
    (shape,), (batch,) = key, plan.batches
    check_holds(shape, batch)
    assert shape.tokens >= batch.lead + batch.n_tokens
    assert shape.lead == RIDERS


@pytest.mark.parametrize("riders", [1, RIDERS, 64, 100])
@pytest.mark.parametrize("most", [1, 64, 65, 700, 2048, 4096])
def test_places_of_riders_and_tokens_together_are_whole_steps_of_a_product(
    most: int, riders: int
) -> None:
    made = ride_buckets(most, riders)
    assert made == sorted(set(made))
    assert made[0] > 0
    assert made[-1] >= min(most, MIXED_TOKENS)
    assert {tokens + riders for tokens in made[:-1]} <= set(mixed_buckets(most))
    assert len(made) == 1 or made[-2] < min(most, MIXED_TOKENS)


def test_riders_alone_have_a_graph() -> None:
    chosen = Buckets(64, 700, RIDERS)
    key = chosen.key_of(riding(batch_of(0, 0, 0, []), RIDERS))
    assert key == (decode_shape(0, 1, cpu=False).with_riders(RIDERS),)
    assert key in set(chosen.keys(PLAN_MODES))


def test_many_short_prefills_beside_riders_have_a_graph() -> None:
    """A bucket's tokens are no whole tiles there."""
    batch = batch_of(0, 57, 0, [31] * 20 + [32, 34, 35, 35, 35], sampled_prefills=25)
    assert (batch.n_tokens, batch.n_tiles) == (848, 25)
    for more in range(MIXED_PREFILLS - 11 + 1):
        tiled = replace(batch, n_tiles=25 + more)
        assert Buckets(256, 2048, 16).key_of(riding(tiled, 0)) is not None


def test_riders_with_two_sub_batches_have_none() -> None:
    plan = riding(batch_of(0, 8, 0, []), 0)
    two = replace(plan, batches=(*plan.batches, batch_of(1, 0, 8, [])))
    assert Buckets(64, 700, RIDERS).key_of(two) is None


def test_a_decode_shape_serves_any_split_of_its_rows() -> None:
    shape = decode_shape(1, 32, True)
    assert (shape.channel, shape.tokens, shape.gpu_rows, shape.cpu_rows) == (1, 32, 32, 32)
    assert (shape.sampled, shape.tiles, shape.to_cpu) == (32, 0, True)


@pytest.mark.parametrize("max_rows", [1, 64, 65, 100, 255, 256])
def test_a_prefill_beside_as_many_decodes_as_there_may_be_has_a_graph(max_rows: int) -> None:
    shapes = Buckets(max_rows, 2048)
    key = shapes.key_of(plan_of(batch_of(0, max_rows - 1, 0, [200], sampled_prefills=1)))
    assert key is not None
    assert key in set(shapes.keys(("gpu_only",)))
