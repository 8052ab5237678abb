"""What one plan's kernels need to know, uploaded by one copy; ``plan_reader`` writes it.

Every iteration of one bucket finds its rows at the same addresses, so that a captured graph serves
every plan. Places that a plan does not use hold neutral values: they touch no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.cuda.rides import HostRides
from gpu_worker.cuda.spans import HostSwap, OpenTable
from gpu_worker.plan_check import PlanLimits
from gpu_worker.sampler import SamplingParams
from gpu_worker.wanted import Wanted

Array = npt.NDArray[Any]

TILE_Q = 64  # new tokens of one program of prefill attention
PAD_TOKENS = 256  # a bucket may be this much larger than the largest plan
PAD_TILES = 16  # of prefill attention that a bucket may have beside one for each TILE_Q tokens


@dataclass(frozen=True)
class Field:
    """A run of int32 of the metadata, with the value of unused places."""

    at: int
    size: int
    fill: int


class MetaLayout:
    """Where each field lies: int32 offsets, the same for host and device."""

    def __init__(self, limits: PlanLimits) -> None:
        tokens, rows = limits.max_tokens + PAD_TOKENS, limits.max_rows
        tiles = tokens // TILE_Q + max(rows + 1, PAD_TILES)
        lead = limits.ride_capacity if limits.ride_groups else 0
        tokens += lead
        self.chunk = OpenTable(limits.max_positions, limits.max_pages)
        dump = limits.max_slots  # where the tokens of rows that are none go
        wanted = {
            "first_epoch": (2, 0),  # one int64
            "ids": (tokens, 0),
            "positions": (tokens, 0),
            "slots": (tokens, dump),
            "cache_slots": (tokens, -1),
            "pages": (tokens, -1),
            "page_rows": (tokens, 0),
            "q_rows": (tokens, -1),
            "row_tokens": (rows + PAD_TOKENS, 0),
            "row_lens": (rows + PAD_TOKENS, 0),
            "cpu_count": (1, 0),
            "cpu_tokens": (rows + PAD_TOKENS, 0),
            "cpu_tasks": (2 * (rows + PAD_TOKENS), 0),
            "sample_tokens": (rows + PAD_TOKENS + lead, 0),
            "sample_slots": (rows + PAD_TOKENS + lead, dump),
            "tile_rows": (tiles, -1),
            "tile_firsts": (tiles, 0),
            "chunk": (self.chunk.size, 0),  # earlier tokens of the only later chunk on the CPU
            "prefill_tokens": (rows, 0),
            "prefill_news": (rows, 0),
            "prefill_starts": (rows, 0),
            "prefill_tables": (rows, 0),  # -1: earlier tokens lie in the staging
            "table_stride": (1, 0),
        }
        self.fields: dict[str, Field] = {}
        at = 0
        for name, (size, fill) in wanted.items():
            self.fields[name] = Field(at, size, fill)
            at += (size + 3) // 4 * 4
        self.tables_at = at
        self.size = at + rows * limits.max_blocks
        self.blank = np.zeros(at, np.int32)
        for field in self.fields.values():
            self.blank[field.at : field.at + field.size] = field.fill

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The fields of a device buffer, int32; ``first_epoch`` as int64, ``tables`` the rest."""
        parts = {name: buffer[f.at : f.at + f.size] for name, f in self.fields.items()}
        parts["first_epoch"] = parts["first_epoch"].view(torch.int64)
        parts["tables"] = buffer[self.tables_at :]
        return parts


@dataclass(frozen=True)
class CpuChunk:
    """A later chunk of a prefill whose earlier tokens lie in the CPU-cache."""

    slot: int
    start: int
    tile_first: int  # of the batch's tiles; it has those up to the next chunk's


@dataclass(frozen=True)
class HostBatch:
    """One sub-batch as the host sees it; the rest is in its metadata."""

    channel: int
    rows: slice  # of the plan
    n_tokens: int
    n_gpu_rows: int
    cpu_slots: npt.NDArray[np.uint32]
    cpu_lens: npt.NDArray[np.uint32]
    to_cpu: bool  # K and V of some token go to the CPU-cache
    n_tiles: int  # of prefill attention; those of ``cpu_chunks`` come last, in their order
    cpu_chunks: tuple[CpuChunk, ...]
    n_sampled: int
    meta: npt.NDArray[np.int32]  # as uploaded
    used: int  # of it
    lead: int = 0  # places of riders before the rows
    n_ride_sampled: int = 0  # of n_sampled

    @property
    def n_cpu_rows(self) -> int:
        """Rows whose attention is the cpu workers'."""
        return len(self.cpu_slots)

    @property
    def decodes_only(self) -> bool:
        """No prefill."""
        return self.n_tokens == self.n_gpu_rows + self.n_cpu_rows


@dataclass(frozen=True)
class HostPlan:
    """One iteration."""

    plan_id: int
    slots: npt.NDArray[np.uint32]
    batches: tuple[HostBatch, ...]
    swaps: tuple[HostSwap, ...]
    sampled_rows: npt.NDArray[np.intp]
    sampling: SamplingParams
    continued: npt.NDArray[np.bool_]  # [rows]: the token is one that a plan before samples
    wanted: Wanted | None = None
    rides: HostRides | None = None  # in the places before the rows of channel 0

    def channel_rows(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Slots and lengths of the decode_cpu rows, each a pair by channel."""
        none = np.empty(0, np.uint32)
        slots, lens = [none, none], [none, none]
        for batch in self.batches:
            slots[batch.channel], lens[batch.channel] = batch.cpu_slots, batch.cpu_lens
        return (slots[0], slots[1]), (lens[0], lens[1])
