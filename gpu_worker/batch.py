"""Turns one slot of the step ring into tensors, once per plan and without a loop per token.

``Plan`` is a copy: the ring slot may be released as soon as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.plan_check import UNKNOWN_TOKEN, PlanLimits, check_plan
from gpu_worker.riders import Continued, RiderGroup, read_riders
from gpu_worker.sampler import SamplingParams
from gpu_worker.wanted import Wanted, wanted_by
from neo_native import RowKind, SwapKind

if TYPE_CHECKING:
    from neo_native import Sequences, StepSlot

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PrefillRow:
    """One prefill or one chunk of it."""

    slot: int
    start: int  # tokens in its cache before this plan
    tokens: slice  # of the sub-batch
    on_cpu: bool
    earlier: Tensor | None  # int64 [start], flat GPU-cache indices; None on the CPU or without any
    mask: Tensor | None  # bool [new, start + new]; None when start == 0


@dataclass(frozen=True)
class GpuDecodes:
    """All decode_gpu rows of a sub-batch."""

    tokens: slice
    block_table: Tensor  # int64 [rows, columns], padded with block 0
    mask: Tensor  # bool [rows, 1, 1, columns * block_size]


@dataclass(frozen=True)
class CpuDecodes:
    """All decode_cpu rows of a sub-batch."""

    tokens: slice
    slots: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.uint32]

    @property
    def seq_lens(self) -> npt.NDArray[np.uint32]:
        """Tokens to attend over, with the one being decoded."""
        return self.positions + np.uint32(1)


@dataclass(frozen=True)
class SubBatch:
    """The rows that pass the linear layers together. Its channel is its place in the plan."""

    channel: int
    rows: slice  # of the plan
    tokens: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    stores: tuple[tuple[slice, Tensor], ...]  # tokens -> flat GPU-cache indices
    prefills: tuple[PrefillRow, ...]
    gpu_decodes: GpuDecodes | None
    cpu_decodes: CpuDecodes | None
    sampled: Tensor  # int64 [n], tokens whose logits are wanted
    continued: Continued | None = None


@dataclass(frozen=True)
class PlannedSwap:
    """A whole sequence's move between the caches."""

    slot: int
    kind: SwapKind
    index: Tensor  # int64 [n_tokens], flat GPU-cache indices


@dataclass(frozen=True)
class Plan:
    """One iteration."""

    plan_id: int
    slots: npt.NDArray[np.uint32]  # [rows]
    sub_batches: tuple[SubBatch, ...]
    swaps: tuple[PlannedSwap, ...]
    sampled_rows: npt.NDArray[np.intp]  # rows of the plan, in the order of their logits
    sampling: SamplingParams
    wanted: Wanted | None = None
    riders: tuple[RiderGroup, ...] = ()  # by growing stage; their rows come last

    def channel_rows(self, channel: int) -> tuple[Array, Array]:
        """Slots and sequence lengths of a channel's decode_cpu rows (uint32, may be empty)."""
        for sub in self.sub_batches:
            if sub.channel == channel and sub.cpu_decodes is not None:
                return sub.cpu_decodes.slots, sub.cpu_decodes.seq_lens
        return np.empty(0, np.uint32), np.empty(0, np.uint32)


@dataclass(frozen=True)
class PlanColumns:
    """Columns of the plan's rows, and of its tokens in row order."""

    slots: npt.NDArray[np.uint32]
    kinds: Array
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]  # [rows + 1], first token of each row
    token_ids: npt.NDArray[np.int64]
    token_positions: npt.NDArray[np.int64]
    token_slots: npt.NDArray[np.uint32]


class PlanReader:
    """Reads plans; raises ``BadPlanError`` for what breaks the contract of ``wire.hpp``."""

    def __init__(self, sequences: Sequences, limits: PlanLimits, device: torch.device) -> None:
        self._sequences = sequences
        self._limits = limits
        self._device = device

    def read(self, step: StepSlot) -> Plan:
        """A checked copy of the step, on the device."""
        check_plan(step, self._sequences, self._limits)
        header = step.header
        n_rows = [int(n) for n in header["n_rows"]]
        rows = step.rows[: sum(n_rows)]
        columns = plan_columns(rows, step.tokens)
        bounds = (slice(0, n_rows[0]), slice(n_rows[0], n_rows[0] + n_rows[1]))
        sampled = np.flatnonzero(rows["sample"])
        return Plan(
            plan_id=int(header["plan_id"]),
            slots=columns.slots,
            sub_batches=tuple(
                self._sub_batch(channel, bound, columns, rows["sample"][bound])
                for channel, bound in enumerate(bounds)
                if bound.start < bound.stop
            ),
            swaps=tuple(self._swaps(step.swaps[: int(header["n_swaps"])])),
            sampled_rows=sampled,
            sampling=sampling_params(self._sequences, columns, sampled),
            wanted=wanted_by(self._sequences, columns, sampled, n_rows),
            riders=read_riders(
                rows[bounds[1].stop :],
                bounds[1].stop,
                columns,
                self._sequences,
                self._limits,
                self._device,
            ),
        )

    def _sub_batch(self, channel: int, bound: slice, rows: PlanColumns, sample: Array) -> SubBatch:
        base = int(rows.first[bound.start])
        tokens = slice(base, int(rows.first[bound.stop]))
        last = rows.first[bound.start + 1 : bound.stop + 1] - 1 - base
        spans = _kind_spans(rows.kinds[bound], bound.start)
        ids = rows.token_ids[tokens]
        return SubBatch(
            channel=channel,
            rows=bound,
            tokens=self._tensor(ids.clip(min=0)),
            positions=self._tensor(rows.token_positions[tokens]),
            stores=tuple(
                self._store(spans[kind], rows, base)
                for kind in (RowKind.PREFILL_GPU, RowKind.DECODE_GPU)
                if kind in spans
            ),
            prefills=tuple(
                self._prefill(row, rows, base, kind is RowKind.PREFILL_CPU)
                for kind in (RowKind.PREFILL_GPU, RowKind.PREFILL_CPU)
                for row in _range(spans.get(kind))
            ),
            gpu_decodes=self._gpu_decodes(spans.get(RowKind.DECODE_GPU), rows, base),
            cpu_decodes=_cpu_decodes(spans.get(RowKind.DECODE_CPU), rows, base),
            sampled=self._tensor(last[sample != 0]),
            continued=_continued(ids, last, bound, rows),
        )

    def _store(self, span: slice, rows: PlanColumns, base: int) -> tuple[slice, Tensor]:
        tokens = _token_span(span, rows)
        index = self._flat_index(rows.token_slots[tokens], rows.token_positions[tokens])
        return slice(tokens.start - base, tokens.stop - base), self._tensor(index)

    def _prefill(self, row: int, rows: PlanColumns, base: int, on_cpu: bool) -> PrefillRow:
        slot, start, new = int(rows.slots[row]), int(rows.starts[row]), int(rows.counts[row])
        first = int(rows.first[row]) - base
        earlier = mask = None
        if start > 0:
            keys = torch.arange(start + new, device=self._device)
            mask = keys <= keys[start:].unsqueeze(1)
        if start > 0 and not on_cpu:
            earlier = self._tensor(self._flat_index(np.uint32(slot), np.arange(start)))
        return PrefillRow(slot, start, slice(first, first + new), on_cpu, earlier, mask)

    def _gpu_decodes(self, span: slice | None, rows: PlanColumns, base: int) -> GpuDecodes | None:
        if span is None:
            return None
        tokens = _token_span(span, rows)
        lengths = rows.starts[span] + 1
        size = self._limits.block_size
        columns = -(-int(lengths.max()) // size)
        table = self._sequences.block_table[rows.slots[span], :columns].astype(np.int64)
        # Columns past a row's end hold whatever the slot's last owner had; block 0 always exists.
        table[np.arange(columns) * size >= lengths[:, None]] = 0
        mask = np.arange(columns * size) < lengths[:, None]
        return GpuDecodes(
            tokens=slice(tokens.start - base, tokens.stop - base),
            block_table=self._tensor(table),
            mask=self._tensor(mask[:, None, None, :]),
        )

    def _swaps(self, swaps: Array) -> Iterator[PlannedSwap]:
        """Out before in, so that what an out frees may be used by an in."""
        for kind in (SwapKind.OUT, SwapKind.IN):
            for swap in swaps[swaps["kind"] == kind]:
                index = self._flat_index(swap["slot"], np.arange(int(swap["n_tokens"])))
                yield PlannedSwap(int(swap["slot"]), kind, self._tensor(index))

    def _flat_index(self, slots: Array | np.uint32, positions: Array) -> npt.NDArray[np.int64]:
        size = self._limits.block_size
        blocks = self._sequences.block_table[slots, positions // size].astype(np.int64)
        return np.asarray(blocks * size + positions % size, dtype=np.int64)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def sampling_params(
    sequences: Sequences, rows: PlanColumns, sampled: npt.NDArray[np.intp]
) -> SamplingParams:
    """Of the plan's sampled rows."""
    params = sequences.params[rows.slots[sampled]]
    return SamplingParams(
        seeds=params["seed"],
        positions=(rows.starts + rows.counts)[sampled].astype(np.uint32),
        temperature=params["temperature"],
        top_k=params["top_k"],
        top_p=params["top_p"],
        min_p=params["min_p"],
    )


def plan_columns(rows: Array, tokens: Array) -> PlanColumns:
    """``rows``: StepRow [rows] of a step; ``tokens``: its token ids."""
    counts = rows["n_new"].astype(np.int64)
    starts = rows["start"].astype(np.int64)
    first = np.concatenate(([0], counts.cumsum()))
    within = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    slots = rows["slot"].copy()
    return PlanColumns(
        slots=slots,
        kinds=rows["kind"].copy(),
        starts=starts,
        counts=counts,
        first=first,
        token_ids=tokens[np.repeat(rows["token_at"].astype(np.int64), counts) + within].astype(
            np.int64
        ),
        token_positions=np.repeat(starts, counts) + within,
        token_slots=np.repeat(slots, counts),
    )


def _kind_spans(kinds: Array, offset: int) -> dict[RowKind, slice]:
    """Rows of the plan by kind; within a sub-batch each kind's rows lie together."""
    spans = {}
    for kind in RowKind:
        low, high = (int(np.searchsorted(kinds, kind, side)) for side in ("left", "right"))
        if low < high:
            spans[kind] = slice(offset + low, offset + high)
    return spans


def _token_span(span: slice, rows: PlanColumns) -> slice:
    return slice(int(rows.first[span.start]), int(rows.first[span.stop]))


def _range(span: slice | None) -> range:
    return range(span.start, span.stop) if span else range(0)


def _continued(
    ids: npt.NDArray[np.int64], last: npt.NDArray[np.int64], bound: slice, rows: PlanColumns
) -> Continued | None:
    """``ids``: of the sub-batch's tokens; ``last``: each row's last token in it."""
    within = np.flatnonzero(ids[last] == UNKNOWN_TOKEN)
    if len(within) == 0:
        return None
    at = bound.start + within
    return Continued(tokens=last[within], rows=at, slots=rows.slots[at])


def _cpu_decodes(span: slice | None, rows: PlanColumns, base: int) -> CpuDecodes | None:
    if span is None:
        return None
    tokens = _token_span(span, rows)
    return CpuDecodes(
        tokens=slice(tokens.start - base, tokens.stop - base),
        slots=rows.slots[span],
        positions=rows.starts[span].astype(np.uint32),
    )
