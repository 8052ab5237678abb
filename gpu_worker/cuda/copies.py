"""Swaps of plans, on streams of their own beside the iterations.

What a swap may not overtake, and what may not overtake it, is known on the host: a plan names its
sequences, a swap its blocks. So

- a swap runs behind the last iteration that named its sequence, which wrote what is copied, and
  behind swaps of the other direction with the same sequence or the same blocks (what a swap-out
  frees may be filled by a swap-in of the same plan);
- an iteration runs behind the swaps of its sequences (their blocks have arrived; their pages are
  published to cpu workers by this iteration or a later one, never by the swap) and behind those
  whose blocks it stores into, its own plan's or an earlier one's;
- any other iteration waits for no swap, but its plan is reported only once its swaps are through,
  since the server then gives pages and slots to others.

All layers go in a few parts with an event behind each. An iteration that is launched kernel by
kernel waits for a part where it reaches its layers; a captured graph waits for all of them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpu_worker.cuda.chunks import CopiesPages
from gpu_worker.cuda.plan import HostPlan, MetaLayout
from gpu_worker.cuda.spans import HostSwap, SpanUploads
from gpu_worker.cuda.streams import Lane, Mark, Streams
from neo_native import SwapKind

Array = npt.NDArray[Any]
Marked = Callable[[Lane, int], AbstractContextManager[object]]  # around a part from this layer on

PARTS = 4  # of the layers
LANES = {SwapKind.OUT: Lane.OUT, SwapKind.IN: Lane.IN}


@dataclass(frozen=True)
class Job:
    """All swaps of one plan in one direction."""

    lane: Lane
    slots: Array
    blocks: Array
    parts: tuple[Mark, ...]  # behind each part of the layers

    def meets(self, slots: Array, blocks: Array) -> bool:
        """One of the sequences or blocks is the job's."""
        return bool(np.isin(self.slots, slots).any() or np.isin(self.blocks, blocks).any())


class Copies:
    """The swaps of one plan after the other."""

    def __init__(
        self,
        exchange: CopiesPages,
        cache: Tensor,
        layout: MetaLayout,
        streams: Streams,
        uploads: dict[Lane, SpanUploads],
        depth: int,
    ) -> None:
        """``cache``: the GPU-cache's blocks. ``depth``: plans in flight at most."""
        self._exchange = exchange
        self._cache = cache
        self._cache_slots = layout.fields["cache_slots"]
        self._streams = streams
        self._uploads = uploads
        self._parts = _parts(len(cache))
        self._jobs: list[Job] = []  # that may not be through
        # Slots of the plans in flight and the ends of their iterations.
        self._iterations: deque[tuple[Array, Mark]] = deque(maxlen=depth)
        self._held: list[Job] = []  # what the iteration to come waits for
        self._own: list[Job] = []

    def start(self, plan: HostPlan, marked: Marked = lambda lane, layer: nullcontext()) -> None:
        """Enqueues the plan's swaps, before its iteration. ``marked``: for a timeline."""
        self._jobs = [job for job in self._jobs if not job.parts[-1].query()]
        self._own = []
        for kind, lane in LANES.items():
            spans = [swap for swap in plan.swaps if swap.kind is kind and swap.n_tokens]
            if spans:
                self._own.append(self._start(lane, kind, spans, marked))
                self._jobs.append(self._own[-1])
        self._held = []
        if self._jobs:
            stored = self._stored_blocks(plan)
            self._held = [job for job in self._jobs if job.meets(plan.slots, stored)]

    def hold(self) -> None:
        """The iteration to come is done behind all that it must not overtake."""
        for job in self._held:
            self._streams.wait(Lane.COMPUTE, job.parts[-1])

    def hold_layer(self, layer: int) -> None:
        """As ``hold``, for this layer and those up to the next part's; called for every layer."""
        for part, layers in enumerate(self._parts):
            if layer == layers.start:
                for job in self._held:
                    self._streams.wait(Lane.COMPUTE, job.parts[part])

    def finish(self, plan: HostPlan) -> list[Mark]:
        """Once the iteration is enqueued; returns what to wait for before the plan is reported."""
        self._iterations.append((plan.slots, self._streams.mark(Lane.COMPUTE)))
        return [job.parts[-1] for job in self._own]

    def _start(self, lane: Lane, kind: SwapKind, spans: Sequence[HostSwap], marked: Marked) -> Job:
        slots = np.array([span.slot for span in spans])
        blocks = np.concatenate([span.blocks for span in spans])
        streams = self._streams
        for named, end in reversed(self._iterations):
            if np.isin(slots, named).any():
                streams.wait(lane, end)
                break
        ahead = [job for job in self._jobs if job.lane is not lane and job.meets(slots, blocks)]
        table = self._uploads[lane].put(spans)
        parts = []
        for i, layers in enumerate(self._parts):
            for job in ahead:
                streams.wait(lane, job.parts[i])
            with streams.on(lane), marked(lane, layers.start):
                cache = self._cache[layers.start : layers.stop]
                self._exchange.copy_pages(cache, layers, table, range(table.n_groups), kind)
            parts.append(streams.mark(lane))
        return Job(lane, slots, blocks, tuple(parts))

    def _stored_blocks(self, plan: HostPlan) -> Array:
        """Blocks of the GPU-cache that the plan's rows write."""
        field, size = self._cache_slots, self._cache.shape[3]
        places = [batch.meta[field.at : field.at + field.size] for batch in plan.batches]
        at = np.concatenate(places) if places else np.empty(0, np.int32)
        return np.unique(at[at >= 0] // size)


def _parts(layers: int) -> list[range]:
    """As equal as may be, none empty."""
    edges = np.unique(np.linspace(0, layers, PARTS + 1).astype(int)).tolist()
    return [range(begin, end) for begin, end in pairwise(edges)]
