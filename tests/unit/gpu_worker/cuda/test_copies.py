"""The order of swaps and iterations: the real scheduler's plans, the real executor, no device.

Every place that two operations meet in (a block or page of one layer, a staging buffer) must see
them as if everything ran on one stream; and what need not wait must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from gpu_worker.cuda.copies import PARTS
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.spans import HostSwap, SpanUploads, span_table, table_size
from gpu_worker.cuda.streams import Lane
from neo_native import RowKind, SwapKind
from neo_server.geometry import PLANS_IN_FLIGHT
from tests.helpers.engine_rig import Row, make_step
from tests.helpers.recorded_streams import Operation, RecordedStreams
from tests.unit.gpu_worker.cuda.recorded import (
    CPU,
    LAYERS,
    ROWS,
    RecordedExchange,
    limits_of,
    named_by,
)
from tests.unit.gpu_worker.cuda.serving import Served, recorded
from tests.unit.neo_server.simulation import Simulation, Sizes

__all__ = ["recorded"]  # a fixture

LOOSE = Sizes(gpu_blocks=60, cpu_pages=40, max_num_seqs=8, budget=24, layers=LAYERS)
TIGHT = Sizes(gpu_blocks=14, cpu_pages=12, max_num_seqs=5, budget=12, layers=LAYERS)
CASES = [
    pytest.param("churn", LOOSE, 0.5, id="room"),
    pytest.param("churn", TIGHT, 0.5, id="blocks given away at once"),
    pytest.param("churn", TIGHT, 0.0, id="kernel by kernel"),
    pytest.param("churn", TIGHT, 1.0, id="graphs"),
    pytest.param("restful_churn", TIGHT, 0.5, id="the moved rest"),
    pytest.param("ride_churn", LOOSE, 0.5, id="riders"),
    pytest.param("neo", TIGHT, 0.5, id="neo"),
]


@pytest.mark.parametrize(("policy", "sizes", "graphs"), CASES)
@pytest.mark.parametrize("done_rate", [0.0, 0.5])
def test_everything_is_done_as_if_on_one_stream(
    recorded: Callable[..., Served], policy: str, sizes: Sizes, graphs: float, done_rate: float
) -> None:
    fields = {"policy": policy if policy == "neo" else f"tests.helpers.policies:{policy}"}
    riders = {"ride_capacity": 2} if policy == "ride_churn" else {}
    for seed in range(2):
        served = recorded(Sizes(**vars(sizes) | fields | riders), seed, graphs, done_rate)
        assert served.rows > 100
        assert served.swaps > 0 or policy == "neo"


class Enqueued:
    """Plans of a few rows through ``Copies``, each iteration one operation a layer."""

    def __init__(self) -> None:
        sizes = Sizes(**vars(LOOSE))
        self.simulation = Simulation(sizes)
        tables, per_slot = self.simulation.tables, 7
        tables.block_table[:, :per_slot] = np.arange(8 * per_slot).reshape(8, per_slot)
        tables.page_table[:, :5] = np.arange(8 * 5).reshape(8, 5)
        self.reader = HostPlanReader(cast(Any, tables), limits_of(sizes))
        self.streams = RecordedStreams(random.Random(0), done_rate=0.0)
        cache = torch.zeros(LAYERS, 2, sizes.gpu_blocks, sizes.block_size, 1, 1)
        exchange = RecordedExchange(self.reader, self.streams, cache)
        self.copies = exchange.copies(cache, PLANS_IN_FLIGHT)

    def run(
        self, rows: list[Row], swaps: list[tuple[int, SwapKind, int]], by_layer: bool = False
    ) -> tuple[list[Operation], list[Operation]]:
        """The plan's copies and the layers of its iteration."""
        begin = len(self.streams.operations)
        plan = self.reader.read(make_step(1, rows, swaps=swaps))
        self.copies.start(plan)
        copies = self.streams.operations[begin:]
        if not by_layer:
            self.copies.hold()
        layers = []
        for layer in range(LAYERS):
            if by_layer:
                self.copies.hold_layer(layer)
            layers.append(self.streams.operate("compute"))
        self.copies.finish(plan)
        return copies, layers


def decode(slot: int, position: int = 8) -> Row:
    return Row(slot, RowKind.DECODE_GPU, position, [5])


OTHER, MOVED = 1, 3


@pytest.mark.parametrize("kind", list(SwapKind))
def test_an_iteration_that_touches_nothing_of_a_swap_does_not_wait_for_it(kind: SwapKind) -> None:
    enqueued = Enqueued()
    copies, layers = enqueued.run([decode(OTHER)], [(MOVED, kind, 9)])
    _, following = enqueued.run([decode(OTHER, 9)], [])
    assert len(copies) == PARTS
    assert not any(layer.waits_for(copy) for layer in layers + following for copy in copies)
    _, returning = enqueued.run([decode(MOVED)], [])  # a plan later
    assert all(returning[0].waits_for(copy) for copy in copies)


@pytest.mark.parametrize("kind", list(SwapKind))
def test_a_swap_waits_for_the_last_iteration_of_its_sequence_alone(kind: SwapKind) -> None:
    enqueued = Enqueued()
    _, layers = enqueued.run([decode(MOVED)], [])
    _, later = enqueued.run([decode(OTHER)], [])
    copies, _ = enqueued.run([decode(OTHER, 9)], [(MOVED, kind, 9)])
    assert all(copies[0].waits_for(layer) for layer in layers)
    assert not any(copy.waits_for(layer) for copy in copies for layer in later)


def test_swaps_of_both_directions_run_side_by_side() -> None:
    copies, _ = Enqueued().run([], [(2, SwapKind.OUT, 9), (MOVED, SwapKind.IN, 9)])
    out, into = copies[:PARTS], copies[PARTS:]
    assert not any(a.waits_for(b) or b.waits_for(a) for a in out for b in into)


def test_a_swap_in_waits_for_what_frees_its_blocks() -> None:
    enqueued = Enqueued()
    table = enqueued.simulation.tables.block_table
    table[MOVED] = table[2]
    copies, _ = enqueued.run([], [(2, SwapKind.OUT, 9), (MOVED, SwapKind.IN, 9)])
    for i in range(PARTS):  # part by part
        assert copies[PARTS + i].waits_for(copies[i])
    assert not copies[PARTS].waits_for(copies[1])


def test_an_iteration_that_stores_into_freed_blocks_waits_for_the_swap_out() -> None:
    enqueued = Enqueued()
    table = enqueued.simulation.tables.block_table
    table[OTHER, 4] = table[MOVED, 0]  # of positions 8 and 9
    copies, layers = enqueued.run([decode(OTHER)], [(MOVED, SwapKind.OUT, 9)])
    assert all(layers[0].waits_for(copy) for copy in copies)


def test_layers_wait_for_their_part_where_they_are_launched_one_by_one() -> None:
    copies, layers = Enqueued().run([decode(MOVED)], [(MOVED, SwapKind.IN, 8)], by_layer=True)
    waited = [sum(layer.waits_for(copy) for copy in copies) for layer in layers]
    assert waited[0] == 1
    assert waited[-1] == PARTS
    assert waited == sorted(waited)


def test_later_chunks_are_loaded_in_order(recorded: Callable[..., Served]) -> None:
    fields = {"policy": "simple-offload", "budget": 4}
    served = recorded(Sizes(**vars(LOOSE) | fields), 0, 0.5)
    assert served.chunks > 0


SPANS = (1, 16, 17, 50)  # tokens


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_table_names_each_token_once(rows: int) -> None:
    draw = np.random.default_rng(0)
    spans = [
        HostSwap(SwapKind.OUT, slot, n, draw.permutation(n // 2 + 1).astype(np.int32) + 100 * slot,
                 np.arange(n // 4 + 1, dtype=np.int32) + 100 * slot)
        for slot, n in enumerate(SPANS)
    ]  # fmt: skip
    table = span_table(spans, rows)
    assert [len(groups) for groups in table.groups] == [-(-n // rows) for n in SPANS]
    tokens = sum(span.n_tokens for span in spans)
    blocks, pages = (sum(map(len, (getattr(span, name) for span in spans)))
                     for name in ("blocks", "pages"))  # fmt: skip
    assert len(table.ints) <= table_size(len(spans), tokens, rows, blocks, pages)
    for span, groups in zip(spans, table.groups, strict=True):
        at = np.arange(span.n_tokens)
        on_gpu, on_cpu = named_by(table, groups, 2, 4)
        assert on_gpu == set((span.blocks[at // 2] * 2 + at % 2).tolist())
        assert on_cpu == set((span.pages[at // 4] * 4 + at % 4).tolist())


@pytest.mark.parametrize("depth", [2, 3])
def test_the_host_fills_a_buffer_again_only_once_it_was_read(depth: int) -> None:
    streams = RecordedStreams(random.Random(0), done_rate=0.0)
    uploads = SpanUploads(64, ROWS, Lane.OUT, streams, CPU, depth)
    known = []
    for slot in range(4):
        with streams.on(Lane.OUT):
            streams.operate("copy before")
        block, page = np.array([slot], np.int32), np.array([7], np.int32)
        table = uploads.put([HostSwap(SwapKind.OUT, slot, 1, block, page)])
        assert named_by(table, table.groups[0], 4, 4) == ({4 * slot}, {28})
        known.append(streams.host.get(Lane.OUT, 0))
    assert known == [0] * depth + [1, 2][: 4 - depth]
