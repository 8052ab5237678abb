"""Plans of the step ring as kernels read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch import PlanColumns, plan_columns, sampling_params
from gpu_worker.cuda.plan import TILE_Q, CpuChunk, HostBatch, HostPlan, MetaLayout
from gpu_worker.cuda.rides import HostRides, RideLayout, host_rides
from gpu_worker.cuda.spans import HostSwap
from gpu_worker.plan_check import UNKNOWN_TOKEN, PlanLimits, check_plan
from gpu_worker.riders import read_riders
from gpu_worker.wanted import wanted_by
from neo_native import RowKind, SwapKind

if TYPE_CHECKING:
    from neo_native import Sequences, StepSlot

Array = npt.NDArray[Any]


class HostPlanReader:
    """Reads plans into metadata; raises ``BadPlanError`` for what breaks ``wire.hpp``."""

    def __init__(self, sequences: Sequences, limits: PlanLimits) -> None:
        self._sequences = sequences
        self.limits = limits
        self.layout = MetaLayout(limits)
        self.ride_layout = RideLayout(limits)

    def read(self, step: StepSlot) -> HostPlan:
        """A checked copy of the step."""
        check_plan(step, self._sequences, self.limits)
        header = step.header
        n_rows = [int(n) for n in header["n_rows"]]
        rows = step.rows[: sum(n_rows)]
        columns = plan_columns(rows, step.tokens)
        bounds = (slice(0, n_rows[0]), slice(n_rows[0], n_rows[0] + n_rows[1]))
        rides = self._rides(rows[bounds[1].stop :], bounds[1].stop, columns)
        own = [bound.start + np.flatnonzero(rows["sample"][bound]) for bound in bounds]
        sampled = np.concatenate((own[0], rides.sampled if rides else own[0][:0], own[1]))
        continued = columns.token_ids[columns.first[1:] - 1] == UNKNOWN_TOKEN
        for group in rides.groups if rides else ():
            continued[group.rows] &= group.stage == 0
        return HostPlan(
            plan_id=int(header["plan_id"]),
            slots=columns.slots,
            batches=tuple(
                self._batch(channel, bound, columns, rows["sample"], None if channel else rides)
                for channel, bound in enumerate(bounds)
                if bound.start < bound.stop or (rides and channel == 0)
            ),
            swaps=tuple(self._swaps(step.swaps[: int(header["n_swaps"])])),
            sampled_rows=sampled,
            sampling=sampling_params(self._sequences, columns, sampled),
            continued=continued,
            rides=rides,
            wanted=wanted_by(self._sequences, columns, sampled, n_rows),
        )

    def _rides(self, rows: Array, at: int, columns: PlanColumns) -> HostRides | None:
        groups = read_riders(rows, at, columns, self._sequences, self.limits, torch.device("cpu"))
        if not groups:
            return None
        return host_rides(groups, self.ride_layout, self._sequences, self.limits.page_size)

    def _batch(
        self,
        channel: int,
        bound: slice,
        rows: PlanColumns,
        sample: Array,
        rides: HostRides | None,
    ) -> HostBatch:
        """``rides``: that have their places before these rows."""
        base, end = int(rows.first[bound.start]), int(rows.first[bound.stop])
        n = end - base
        kinds, counts = rows.kinds[bound], rows.counts[bound]
        lead = rides.capacity if rides else 0
        firsts, slots = rows.first[bound] - base + lead, rows.slots[bound]
        lens = (rows.starts + rows.counts)[bound]
        meta = np.empty(self.layout.size, np.int32)
        meta[: self.layout.tables_at] = self.layout.blank
        fields = {name: meta[f.at : f.at + f.size] for name, f in self.layout.fields.items()}
        token_kinds = np.repeat(kinds, counts)
        mine = slice(lead, lead + n)
        fields["ids"][mine] = rows.token_ids[base:end]
        fields["positions"][mine] = rows.token_positions[base:end]
        fields["slots"][mine] = rows.token_slots[base:end]
        self._places(fields, mine, token_kinds, rows, base)
        gpu = np.flatnonzero(kinds == RowKind.DECODE_GPU)
        cpu = np.flatnonzero(kinds == RowKind.DECODE_CPU)
        prefill = np.flatnonzero(kinds <= RowKind.PREFILL_CPU)
        fields["row_tokens"][: len(gpu)] = firsts[gpu]
        fields["row_lens"][: len(gpu)] = lens[gpu]
        fields["cpu_count"][0] = len(cpu)
        fields["cpu_tokens"][: len(cpu)] = firsts[cpu]
        fields["q_rows"][firsts[cpu]] = np.arange(len(cpu))
        sampled = np.flatnonzero(sample[bound])
        fields["sample_tokens"][: len(sampled)] = (firsts + counts - 1)[sampled]
        fields["sample_slots"][: len(sampled)] = slots[sampled]
        n_rides = _embed_and_sample(fields, rides, len(sampled)) if rides else 0
        n_tiles, chunks = _prefills(fields, prefill, kinds, firsts, counts, lens, slots, len(gpu))
        if len(chunks) == 1:
            span = self.pages_of(chunks[0].slot, chunks[0].start)
            self.layout.chunk.fill(fields["chunk"], span)
        used = self._tables(
            meta, fields, np.concatenate((gpu, prefill)), slots, lens, kinds, counts
        )
        return HostBatch(
            channel=channel,
            rows=bound,
            n_tokens=n,
            n_gpu_rows=len(gpu),
            cpu_slots=slots[cpu],
            cpu_lens=lens[cpu].astype(np.uint32),
            to_cpu=bool((kinds == RowKind.PREFILL_CPU).any()) or len(cpu) > 0,
            n_tiles=n_tiles,
            cpu_chunks=chunks,
            n_sampled=len(sampled) + n_rides,
            meta=meta,
            used=used,
            lead=lead,
            n_ride_sampled=n_rides,
        )

    def _places(
        self, fields: dict[str, Array], mine: slice, kinds: Array, rows: PlanColumns, base: int
    ) -> None:
        """Where each token's K and V go. ``mine``: their places in the fields."""
        n = mine.stop - mine.start
        slots = rows.token_slots[base : base + n]
        positions = rows.token_positions[base : base + n]
        on_gpu = (kinds == RowKind.PREFILL_GPU) | (kinds == RowKind.DECODE_GPU)
        size = self.limits.block_size
        blocks = self._sequences.block_table[slots[on_gpu], positions[on_gpu] // size]
        fields["cache_slots"][mine][on_gpu] = (
            blocks.astype(np.int64) * size + positions[on_gpu] % size
        )
        if on_gpu.all():
            return
        size = self.limits.page_size
        fields["pages"][mine][~on_gpu] = self._sequences.page_table[
            slots[~on_gpu], positions[~on_gpu] // size
        ]
        fields["page_rows"][mine][~on_gpu] = positions[~on_gpu] % size

    def _tables(
        self,
        meta: Array,
        fields: dict[str, Array],
        with_table: Array,
        slots: Array,
        lens: Array,
        kinds: Array,
        counts: Array,
    ) -> int:
        """Block tables of GPU decodes, then of prefills; returns how much of ``meta`` is used."""
        at, size = self.layout.tables_at, self.limits.block_size
        held = np.where(kinds == RowKind.DECODE_GPU, lens, lens - counts)
        held = np.where(kinds == RowKind.PREFILL_CPU, 0, held)[with_table]
        columns = int(-(-held.max(initial=0) // size))
        if columns == 0:
            return at
        table = self._sequences.block_table[slots[with_table], :columns].astype(np.int32)
        # Columns past a row's end hold whatever the slot's last owner had; block 0 always exists.
        table[np.arange(columns) * size >= held[:, None]] = 0
        meta[at : at + table.size] = table.ravel()
        fields["table_stride"][0] = columns
        return at + table.size

    def _swaps(self, swaps: Array) -> list[HostSwap]:
        """Out before in, so that what an out frees may be used by an in."""
        found = []
        for kind in (SwapKind.OUT, SwapKind.IN):
            for swap in swaps[swaps["kind"] == kind]:
                found.append(self.span(int(swap["slot"]), int(swap["n_tokens"]), kind))
        return found

    def span(self, slot: int, n_tokens: int, kind: SwapKind) -> HostSwap:
        """Tokens [0, n_tokens) of a slot, in both caches."""
        pages = self._pages(slot, n_tokens)
        blocks = self._sequences.block_table[slot, : -(-n_tokens // self.limits.block_size)]
        return HostSwap(kind, slot, n_tokens, blocks.astype(np.int32), pages)

    def pages_of(self, slot: int, n_tokens: int) -> HostSwap:
        """Tokens [0, n_tokens) of a slot of the CPU-cache, on the device all in one block."""
        block = np.zeros(1, np.int32)
        return HostSwap(SwapKind.IN, slot, n_tokens, block, self._pages(slot, n_tokens))

    def _pages(self, slot: int, n_tokens: int) -> npt.NDArray[np.int32]:
        n_pages = -(-n_tokens // self.limits.page_size)
        return self._sequences.page_table[slot, :n_pages].astype(np.int32)


def _embed_and_sample(fields: dict[str, Array], rides: HostRides, at: int) -> int:
    """Riders of the first stage and of the last, which needs ``at`` on; returns the latter's."""
    if rides.first is not None:
        n = len(rides.first.slots)
        ids = rides.first.tokens.numpy().astype(np.int32)
        if rides.first.continued is not None:
            ids[rides.first.continued.tokens] = UNKNOWN_TOKEN
        fields["ids"][:n], fields["slots"][:n] = ids, rides.first.slots
    if rides.last is None:
        return 0
    n = len(rides.last.slots)
    fields["sample_tokens"][at : at + n] = np.arange(n)
    fields["sample_slots"][at : at + n] = rides.last.slots
    return n


def _prefills(
    fields: dict[str, Array],
    prefill: Array,
    kinds: Array,
    firsts: Array,
    counts: Array,
    lens: Array,
    slots: Array,
    first_table: int,
) -> tuple[int, tuple[CpuChunk, ...]]:
    """Rows and tiles of prefill attention; those of later chunks of CPU prefills come last.

    A row's last tile, which attends over the most tokens, comes first: what takes longest begins
    first.
    """
    starts = lens - counts
    staged = (kinds == RowKind.PREFILL_CPU) & (starts > 0)
    at, chunks = 0, []
    ordered = np.concatenate((prefill[~staged[prefill]], prefill[staged[prefill]]))
    order_in_table = {int(row): i for i, row in enumerate(prefill)}
    for i, row in enumerate(ordered.tolist()):
        tiles = int(-(-counts[row] // TILE_Q))
        fields["tile_rows"][at : at + tiles] = i
        fields["tile_firsts"][at : at + tiles] = np.arange(tiles)[::-1] * TILE_Q
        fields["prefill_tokens"][i] = firsts[row]
        fields["prefill_news"][i] = counts[row]
        fields["prefill_starts"][i] = starts[row]
        fields["prefill_tables"][i] = -1 if staged[row] else first_table + order_in_table[row]
        if staged[row]:
            chunks.append(CpuChunk(int(slots[row]), int(starts[row]), at))
        at += tiles
    return at, tuple(chunks)
