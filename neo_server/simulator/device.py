"""When the iterations and swaps of plans begin and end, under a cost model.

As ``gpu_worker/cuda/copies.py`` orders them: an iteration begins once the one before it is over and
the swaps of its sequences, and those whose blocks it stores into, are through; a swap once the last
iteration that named its sequence is over, and what lies before it on its direction's lane. Where
the cost model says that nothing overlaps, a plan's swaps come before its iteration, in line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neo_native import RowKind, SwapKind
from neo_server.cost_model import CostModel
from neo_server.step import Step
from neo_server.step_cost import load_of_step

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Times:
    """Of one plan: seconds on the simulator's clock."""

    begin: float  # of what the gpu worker would time: waits for swaps are in it
    end: float
    reported: float  # its swaps are through too


@dataclass(frozen=True, slots=True)
class _Swaps:
    """Of one plan in one direction."""

    kind: SwapKind
    slots: Array
    blocks: Array
    end: float

    def meets(self, slots: Array, blocks: Array) -> bool:
        return bool(np.isin(self.slots, slots).any() or np.isin(self.blocks, blocks).any())


class Device:
    """The lanes of a gpu worker. Steps come in the order of plans."""

    def __init__(self, cost: CostModel, block_table: Array, block_size: int) -> None:
        """``block_table``: [slots, blocks], as the plan that is enqueued finds it."""
        self._cost = cost
        self._table = block_table
        self._size = block_size
        self._over = 0.0  # the latest iteration's end
        self._named = np.zeros(len(block_table))  # by slot: end of the last iteration with it
        self._lanes = dict.fromkeys((SwapKind.OUT, SwapKind.IN), 0.0)
        self._swaps: list[_Swaps] = []
        self.waited_s = 0.0  # of iterations for swaps

    def enqueue(self, step: Step, now: float) -> Times:
        """A plan that arrives at ``now``, once its tables are written."""
        begin = max(now, self._over)
        if not self._cost.overlaps_transfers:
            self._over = begin + load_of_step(step).seconds(self._cost)
            return Times(begin, self._over, self._over)
        self._swaps = [swaps for swaps in self._swaps if swaps.end > begin]
        own = [self._start(step, kind, now) for kind in self._lanes]
        through = max((swaps.end for swaps in own if swaps is not None), default=0.0)
        starts = begin
        if self._swaps:
            stored = self._stored(step)
            held = [swaps.end for swaps in self._swaps if swaps.meets(step.slot, stored)]
            starts = max((begin, *held))
        self.waited_s += starts - begin
        self._over = starts + load_of_step(step, swaps=False).seconds(self._cost)
        self._named[step.slot] = self._over
        return Times(begin, self._over, max(self._over, through))

    def _start(self, step: Step, kind: SwapKind, now: float) -> _Swaps | None:
        mine = [swap for swap in step.swaps if swap.kind == kind and swap.n_tokens]
        if not mine:
            return None
        slots = np.array([swap.slot for swap in mine])
        spans = [self._table[s.slot, : -(-s.n_tokens // self._size)] for s in mine]
        blocks = np.concatenate(spans)
        ahead = [s.end for s in self._swaps if s.kind != kind and s.meets(slots, blocks)]
        begin = max((now, self._lanes[kind], float(self._named[slots].max()), *ahead))
        tokens = sum(swap.n_tokens for swap in mine)
        end = begin + self._cost.num_layers * self._cost.transfer(tokens)
        self._lanes[kind] = end
        self._swaps.append(_Swaps(kind, slots, blocks, end))
        return self._swaps[-1]

    def _stored(self, step: Step) -> Array:
        """Blocks of the GPU-cache that the plan's rows write."""
        on_gpu = (step.kind == RowKind.DECODE_GPU) | (step.kind == RowKind.PREFILL_GPU)
        first = step.start[on_gpu] // self._size
        last = (step.start[on_gpu] + step.n_new[on_gpu] - 1) // self._size
        rows = zip(step.slot[on_gpu].tolist(), first.tolist(), last.tolist(), strict=True)
        spans = [self._table[slot, begin : end + 1] for slot, begin, end in rows]
        return np.concatenate(spans) if spans else np.empty(0, np.uint32)
