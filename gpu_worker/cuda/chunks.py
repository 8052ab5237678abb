"""Earlier chunks of prefills on the CPU, brought to the device layer by layer.

A later chunk attends over what the chunks before left in the CPU-cache. It comes through two
buffers in turn, on the lane of copies in: while attention reads one, the next layer's tokens, or
those of the next such chunk, arrive in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gpu_worker.cuda.spans import HostSwap, SpanTable, SpanUploads
from gpu_worker.cuda.streams import Lane, Mark, Streams
from neo_native import SwapKind

if TYPE_CHECKING:
    from gpu_worker.cuda.plan import CpuChunk


class CopiesPages(Protocol):
    """``DeviceExchange``."""

    def copy_pages(
        self, cache: Tensor, layers: range, table: SpanTable, groups: range, kind: SwapKind
    ) -> None:
        """See there."""


class ChunkLoads:
    """The loads of one iteration after the other."""

    def __init__(
        self,
        exchange: CopiesPages,
        find: Callable[[int, int], HostSwap],
        streams: Streams,
        staging: Tensor,
        uploads: SpanUploads,
    ) -> None:
        """``find``: ``HostPlanReader.pages_of``. ``staging``: see ``Buffers``."""
        self._exchange = exchange
        self._find = find
        self._streams = streams
        self._staging = staging
        self._uploads = uploads
        self._table: SpanTable | None = None
        self._loads: list[tuple[int, range]] = []  # layer, and groups of the table
        self._at = 0
        self._loaded: list[Mark | None] = [None, None]  # by buffer
        self._read: list[Mark | None] = [None, None]

    def begin(self, chunks: Sequence[CpuChunk], layers: int) -> None:
        """``chunks``: those of every layer of an iteration, in the order in which they attend."""
        if not chunks:
            return
        self._follow()
        self._start(
            self._uploads.put([self._find(chunk.slot, chunk.start) for chunk in chunks]), layers
        )

    def begin_open(self, table: SpanTable, layers: int) -> None:
        """One chunk in every layer, or none, as the ``table`` on the device says by then."""
        self._follow()
        self._start(table, layers)

    def _follow(self) -> None:
        """Behind earlier iterations: they stored these tokens, and have read the staging."""
        self._streams.wait(Lane.IN, self._streams.mark(Lane.COMPUTE))
        self._read = [None, None]

    def _start(self, table: SpanTable, layers: int) -> None:
        self._table = table
        self._loads = list(product(range(layers), table.groups))
        self._at = 0
        self._load(0)

    def take(self) -> Tensor:
        """One layer of the next chunk's earlier tokens, [K, V][1][tokens][kv_heads][head_dim].

        For what is launched before ``done``.
        """
        self._load(self._at + 1)
        loaded = self._loaded[self._at % 2]
        assert loaded is not None
        self._streams.wait(Lane.COMPUTE, loaded)
        return self._staging[self._at % 2]

    def done(self) -> None:
        """Whatever reads the layer that was taken last has been launched."""
        self._read[self._at % 2] = self._streams.mark(Lane.COMPUTE)
        self._at += 1

    def _load(self, i: int) -> None:
        if i >= len(self._loads):
            return
        assert self._table is not None
        layer, groups = self._loads[i]
        read = self._read[i % 2]
        if read is not None:
            self._streams.wait(Lane.IN, read)
        cache = self._staging[i % 2].unsqueeze(0)
        with self._streams.on(Lane.IN):
            layers = range(layer, layer + 1)
            self._exchange.copy_pages(cache, layers, self._table, groups, SwapKind.IN)
        self._loaded[i % 2] = self._streams.mark(Lane.IN)
