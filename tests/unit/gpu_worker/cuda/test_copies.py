"""The order of swaps and iterations: the real scheduler's plans, the real executor, no device.

Every place that two operations meet in (a block or page of one layer, a staging buffer) must see
them as if everything ran on one stream; and what need not wait must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.cuda import executor as executor_module
from gpu_worker.cuda.chunks import ChunkLoads
from gpu_worker.cuda.copies import PARTS, Copies
from gpu_worker.cuda.plan import HostPlan
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.cuda.spans import HostSwap, SpanTable, SpanUploads, span_table, table_size
from gpu_worker.cuda.streams import Lane
from gpu_worker.plan_check import PlanLimits
from neo_native import (
    RowKind,
    RowStatus,
    SwapKind,
    result_header_dtype,
    result_row_dtype,
    step_header_dtype,
    step_row_dtype,
)
from neo_server.geometry import PLANS_IN_FLIGHT
from neo_server.gpu_client import read_result, write_step
from neo_server.request import State
from tests.helpers import policies
from tests.helpers.engine_rig import Row, make_step
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.recorded_streams import Operation, RecordedStreams
from tests.unit.neo_server.simulation import Simulation, Sizes, Slot

CPU = torch.device("cpu")
LAYERS, NEW_TOKENS = 6, 10
ROWS = 16  # tokens of a group
LOOSE = Sizes(gpu_blocks=60, cpu_pages=40, max_num_seqs=8, budget=24, layers=LAYERS)
TIGHT = Sizes(gpu_blocks=14, cpu_pages=12, max_num_seqs=5, budget=12, layers=LAYERS)


def limits_of(sizes: Sizes) -> PlanLimits:
    return PlanLimits(
        max_rows=sizes.max_num_seqs, max_tokens=sizes.budget, max_swaps=sizes.max_num_seqs,
        max_slots=sizes.max_num_seqs, block_size=sizes.block_size, num_blocks=sizes.gpu_blocks,
        max_blocks=-(-sizes.max_model_len // sizes.block_size), page_size=sizes.page_size,
        max_pages=-(-sizes.max_model_len // sizes.page_size), num_pages=sizes.cpu_pages,
        max_positions=sizes.max_model_len, vocab_size=251,
        ride_groups=sizes.layers + 1 if sizes.ride_capacity else 0,
        ride_capacity=sizes.ride_capacity,
    )  # fmt: skip


class RecordedExchange:
    """Copies as operations on the places that the uploaded table names."""

    timeout_s = 1.0

    def __init__(self, reader: HostPlanReader, streams: RecordedStreams, cache: Tensor) -> None:
        self.streams = streams
        self._reader = reader
        self._cache = cache
        limits = reader.limits
        self._size = table_size(
            limits.max_rows, limits.num_pages * limits.page_size, ROWS, 999, limits.num_pages
        )
        self.staging = torch.zeros(2, 2, 1, limits.max_positions, 1, 1)
        self.loads = ChunkLoads(
            self, reader.pages_of, streams, self.staging, self._uploads(Lane.IN)
        )

    def _uploads(self, lane: Lane) -> SpanUploads:
        return SpanUploads(self._size, ROWS, lane, self.streams, CPU, PLANS_IN_FLIGHT)

    def copies(self, cache: Tensor, depth: int) -> Copies:
        uploads = {lane: self._uploads(lane) for lane in (Lane.OUT, Lane.IN)}
        return Copies(self, cache, self._reader.layout, self.streams, uploads, depth)

    def copy_pages(
        self, cache: Tensor, layers: range, table: SpanTable, groups: range, kind: SwapKind
    ) -> None:
        on_gpu, on_cpu = named_by(table, groups, cache.shape[3], self._reader.limits.page_size)
        here: list[Any] = [("cpu", token, layer) for token in on_cpu for layer in layers]
        if cache.data_ptr() in (self.staging[0].data_ptr(), self.staging[1].data_ptr()):
            there: list[Any] = [buffer_of(self, cache)]
        else:
            assert torch.equal(cache, self._cache[layers.start : layers.stop])
            there = [("gpu", token, layer) for token in on_gpu for layer in layers]
        if kind is SwapKind.OUT:
            self.streams.operate("swap-out", reads=there, writes=here)
        else:
            self.streams.operate("in", reads=here, writes=there)

    def announce(self, plan: HostPlan) -> int:
        return 0

    def last_epochs(self, plan: HostPlan) -> dict[int, int]:
        return {}

    def last_ride(self, plan: HostPlan) -> int:
        return 0

    def retire(self, plan: HostPlan) -> None:
        pass


def buffer_of(exchange: RecordedExchange, cache: Tensor) -> tuple[str, int]:
    return "staging", int(cache.data_ptr() == exchange.staging[1].data_ptr())


def named_by(
    table: SpanTable, groups: range, block_size: int, page_size: int
) -> tuple[set[int], set[int]]:
    """Tokens of both caches, by number, that some groups name to the kernel."""
    ints = table.ints.tolist()
    on_gpu, on_cpu = set(), set()
    for group in groups:
        first, n, blocks_at, pages_at = ints[4 * ints[table.groups_at + group] :][:4]
        begin = (group - first) * table.rows
        for at in range(begin, min(begin + table.rows, n)):
            block = ints[table.entries_at + blocks_at + at // block_size]
            page = ints[table.entries_at + pages_at + at // page_size]
            on_gpu.add(block * block_size + at % block_size)
            on_cpu.add(page * page_size + at % page_size)
    return on_gpu, on_cpu


class RecordedStages:
    """Iterations as operations on the places that their rows name."""

    def __init__(self, exchange: RecordedExchange, sequences: Any, limits: PlanLimits) -> None:
        self.exchange = exchange
        self._sequences = sequences
        self._limits = limits
        layout = exchange._reader.layout
        rides = exchange._reader.ride_layout
        meta = torch.zeros(layout.size, dtype=torch.int32)
        self.buffers = SimpleNamespace(
            channels=[SimpleNamespace(meta=meta)] * 2,
            rides=SimpleNamespace(layout=rides, meta=torch.from_numpy(rides.blank.copy()))
            if limits.ride_groups
            else None,
            outcome=torch.zeros(3, 64 + 2 * limits.max_rows, dtype=torch.int32),
            rows=limits.max_rows,
        )
        self.rows: Any = None  # of the plan to come

    def forward(self, shapes: Any, at_end: Any = None, at_layer: Any = None) -> None:
        """As ``Stages``."""
        chunks = [chunk for shape in shapes for chunk in shape.cpu_chunks]
        self.exchange.loads.begin(chunks, LAYERS)
        for layer in range(LAYERS):
            if at_layer is not None:
                at_layer(layer)
            self.layer(layer)
            for _ in chunks:
                taken = buffer_of(self.exchange, self.exchange.loads.take())
                self.exchange.streams.operate("attend", reads=[taken])
                self.exchange.loads.done()

    def replay(self) -> None:
        """All layers of a graph; its loads are within it."""
        for layer in range(LAYERS):
            self.exchange.streams.operate("load", writes=[("staging", layer % 2)])
            self.layer(layer)
            self.exchange.streams.operate("attend", reads=[("staging", layer % 2)])

    def layer(self, layer: int) -> None:
        reads, writes = set(), set()
        for slot, kind, start, n_new, stage in self.rows:
            if kind == RowKind.RIDE_CPU and stage != layer:
                continue
            on_cpu = kind % 2 == 1
            name, table, size = (
                ("cpu", self._sequences.page_table, self._limits.page_size)
                if on_cpu
                else ("gpu", self._sequences.block_table, self._limits.block_size)
            )
            at = np.arange(start + n_new)
            tokens = table[slot, at // size].astype(int) * size + at % size
            places = [(name, int(token), layer) for token in tokens]
            reads.update(places)
            writes.update(places[start:])
        self.exchange.streams.operate("compute", reads, writes)


class RecordedEvent:
    """In place of CUDA's; of the lane of iterations."""

    streams: RecordedStreams

    def record(self) -> None:
        self._mark = self.streams.mark(Lane.COMPUTE)

    def query(self) -> bool:
        return self._mark.query()

    def synchronize(self) -> None:
        self._mark.synchronize()

    def elapsed_time(self, end: RecordedEvent) -> float:
        return 0.0


class NoDrawing:
    """In place of sampling."""

    def __init__(self, buffers: Any, features: Any) -> None:
        pass

    def record(self, plan: HostPlan) -> None:
        pass

    def draw(self, plan: HostPlan) -> list[Any]:
        return []


@dataclass
class Served:
    """What a run did."""

    swaps: int = 0
    rows: int = 0
    chunks: int = 0


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    plain_empty, plain_like = torch.empty, torch.empty_like
    unpinned = {"pin_memory": False}
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain_empty(*a, **k | unpinned))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: plain_like(*a, **k | unpinned))
    monkeypatch.setattr(executor_module, "Event", RecordedEvent)
    monkeypatch.setattr(executor_module, "Drawing", NoDrawing)
    return serve


def serve(sizes: Sizes, seed: int, graphs: float, done_rate: float = 0.3) -> Served:
    """Some requests from begin to end. ``graphs``: share of iterations that a graph runs."""
    draw = random.Random(seed)
    policies._random.seed(seed)
    simulation = Simulation(sizes, seed=seed, void_rate=0.02)
    streams = RecordedStreams(draw, done_rate)
    RecordedEvent.streams = streams
    limits = limits_of(sizes)
    reader = HostPlanReader(cast(Any, simulation.tables), limits)
    cache = torch.zeros(LAYERS, 2, sizes.gpu_blocks, sizes.block_size, 1, 1)
    exchange = RecordedExchange(reader, streams, cache)
    stages = RecordedStages(exchange, simulation.tables, limits)

    def find(plan: HostPlan) -> Any:
        """No graph has more than one later chunk."""
        few = sum(len(batch.cpu_chunks) for batch in plan.batches) < 2
        return stages if few and draw.random() < graphs else None

    runner = executor_module.CudaExecutor(
        cast(Any, stages), cast(Any, SimpleNamespace(blocks=cache)), reader.layout,
        cast(Any, SimpleNamespace(find=find)), PLANS_IN_FLIGHT, lambda: True, cast(Any, None),
    )  # fmt: skip
    served = Served()
    scheduler, flights = simulation.scheduler, []
    waiting = [(i, [draw.randrange(251) for _ in range(draw.randint(1, 16))]) for i in range(24)]
    sequences = [simulation.sequence(i, prompt) for i, prompt in waiting]
    for seq in sequences[::-1]:
        scheduler.add(seq)
    while scheduler.has_work or flights:
        step = (
            scheduler.schedule() if len(flights) < PLANS_IN_FLIGHT and scheduler.has_work else None
        )
        if step is not None:
            sent = Slot(step_header_dtype, step_row_dtype, sizes)
            write_step(step, sent)  # type: ignore[arg-type]
            plan = reader.read(sent)  # type: ignore[arg-type]
            rows = sent.rows[: len(step.seqs)]
            stages.rows = rows[["slot", "kind", "start", "n_new", "stage"]].tolist()
            runner.submit(plan)
            served.rows += len(plan.slots)
            served.swaps += len(plan.swaps)
            served.chunks += sum(len(batch.cpu_chunks) for batch in plan.batches)
            flights.append((step, sent))
            continue
        step, sent = flights.pop(0)
        assert RowStatus.VOIDED not in runner.collect().status  # each knows its token
        answers = simulation.model.answer(sent.header, sent.rows, sent.swaps, sent.tokens)
        got = Slot(result_header_dtype, result_row_dtype, sizes)
        got.header["plan_id"], got.header["n_rows"] = step.plan_id, len(answers)
        got.rows["status"][: len(answers)] = [status for status, _ in answers]
        got.rows["token"][: len(answers)] = [token for _, token in answers]
        for seq, _ in scheduler.update(step, read_result(got)):  # type: ignore[arg-type]
            aborted = draw.random() < 0.02
            if len(seq.tokens) - seq.num_prompt == NEW_TOKENS or aborted:
                scheduler.finish(seq)
    assert simulation.is_empty()
    for seq, (i, prompt) in zip(sequences, waiting, strict=True):
        assert seq.state is State.FINISHED
        assert list(seq.tokens)[len(prompt) :] == generate(i, prompt, len(seq.tokens) - len(prompt))
    return served


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
