"""What kernels need to know of tokens that move between the caches.

A table is written on the host and uploaded by one copy. Its int32 are, for each span: first group,
tokens, where its blocks and its pages begin among the entries; then the span of each group of
``rows`` tokens, which is what one program copies at a time (``tiles.CopyTiles``); then the entries,
from a multiple of four on as the groups are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.cuda.streams import Lane, Mark, Streams
from neo_native import SwapKind

Ints = npt.NDArray[np.int32]

SPAN_INTS = 4


@dataclass(frozen=True)
class HostSwap:
    """Tokens [0, n_tokens) of one sequence, that move between the caches."""

    kind: SwapKind
    slot: int
    n_tokens: int
    blocks: Ints  # of the GPU-cache, as many as the tokens need
    pages: Ints


@dataclass(frozen=True)
class SpanTable:
    """Spans as the kernels read them."""

    ints: Any  # int32, an array or a tensor
    groups_at: int
    entries_at: int
    rows: int  # tokens of a group
    groups: tuple[range, ...]  # of each span
    # Of one span, whose tokens the device finds in the table. There are as many groups as can be.
    is_open: bool = False

    @property
    def n_groups(self) -> int:
        """Of all spans."""
        return self.groups[-1].stop if self.groups else 0

    def on(self, ints: Tensor) -> SpanTable:
        """The same table uploaded to ``ints``."""
        return SpanTable(ints, self.groups_at, self.entries_at, self.rows, self.groups)


def span_table(spans: Sequence[HostSwap], rows: int) -> SpanTable:
    """On the host, in groups of ``rows`` tokens."""
    counts = [-(-span.n_tokens // rows) for span in spans]
    ends = np.cumsum([0, *counts])
    groups_at = SPAN_INTS * len(spans)
    entries_at = groups_at + _aligned(int(ends[-1]))
    entries = [part for span in spans for part in (span.blocks, span.pages)]
    starts = np.cumsum([0, *map(len, entries)])
    ints = np.zeros(entries_at + int(starts[-1]), np.int32)
    heads = ints[:groups_at].reshape(-1, SPAN_INTS)
    heads[:, 0], heads[:, 1] = ends[:-1], [span.n_tokens for span in spans]
    heads[:, 2], heads[:, 3] = starts[:-1:2], starts[1::2]
    ints[groups_at : groups_at + ends[-1]] = np.repeat(np.arange(len(spans)), counts)
    ints[entries_at:] = np.concatenate(entries) if entries else []
    groups = tuple(range(int(ends[i]), int(ends[i + 1])) for i in range(len(spans)))
    return SpanTable(ints, groups_at, entries_at, rows, groups)


class OpenTable:
    """One span in a table of fixed places, so that a captured graph serves any."""

    def __init__(self, max_tokens: int, max_pages: int) -> None:
        self._max_tokens = max_tokens
        self.size = SPAN_INTS + 1 + max_pages  # int32 of the table

    def fill(self, ints: Ints, span: HostSwap) -> None:
        """``ints``: zeros. ``span``: its blocks are block 0, as in ``pages_of``."""
        at = SPAN_INTS + 1
        ints[:SPAN_INTS] = 0, span.n_tokens, 0, 1
        ints[at : at + len(span.pages)] = span.pages

    def on(self, ints: Tensor, rows: int) -> SpanTable:
        """The table at these places of the device, read in groups of ``rows`` tokens."""
        groups = (range(-(-self._max_tokens // rows)),)
        return SpanTable(ints, SPAN_INTS, SPAN_INTS, rows, groups, is_open=True)


def table_size(spans: int, tokens: int, rows: int, blocks: int, pages: int) -> int:
    """int32 of the largest table of so many spans, with so many tokens and entries in all."""
    return SPAN_INTS * spans + _aligned(tokens // rows + spans) + blocks + pages


def _aligned(n: int) -> int:
    return -(-n // 4) * 4


class SpanUploads:
    """Tables on their way to the device: allocated once, ``depth`` deep.

    While the device reads the pinned buffers, the host fills the next. The device's buffer is one,
    since its lane reads a table before it gets the next.
    """

    def __init__(
        self,
        size: int,
        rows: int,
        lane: Lane,
        streams: Streams,
        device: torch.device,
        depth: int = 2,
    ) -> None:
        """``size``: int32 of a table at most. ``rows``: tokens of a group."""
        pin = device.type == "cuda"
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(depth)]
        self._read: list[Mark | None] = [None] * depth  # behind the upload from each
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._rows = rows
        self._lane = lane
        self._streams = streams
        self._next = 0

    def put(self, spans: Sequence[HostSwap]) -> SpanTable:
        """The table on the device, for what the lane gets next, until the next call."""
        table, i = span_table(spans, self._rows), self._next
        self._next = (i + 1) % len(self._pinned)
        read = self._read[i]
        if read is not None:
            read.synchronize()
        n = len(table.ints)
        self._pinned[i].numpy()[:n] = table.ints
        with self._streams.on(self._lane):
            self._device[:n].copy_(self._pinned[i][:n], non_blocking=True)
        self._read[i] = self._streams.mark(self._lane)
        return table.on(self._device)
