"""Who owns which GPU-cache block, CPU-cache page and sequence-table slot."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Protocol

import numpy.typing as npt

from neo_server.plan import Place
from neo_server.request import Sequence, State


class Tables(Protocol):
    """The shared sequence table; ``neo_native.Sequences`` has this shape."""

    params: npt.NDArray[Any]  # [max_slots]
    block_table: npt.NDArray[Any]  # uint32 [max_slots, max_blocks]
    page_table: npt.NDArray[Any]  # uint32 [max_slots, max_pages]
    bias: npt.NDArray[Any]  # token_bias_dtype [max_slots, max_biases]


class Pool:
    """Free numbers below ``total``; the last returned is the next taken (its memory is warm)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many are taken."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` numbers; the scheduler has checked that there are as many."""
        if count == 0:
            return []
        if count > len(self._free):
            raise RuntimeError(f"{count} wanted, {len(self._free)} of {self.total} are free")
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def give(self, numbers: list[int]) -> None:
        """Takes them back."""
        self._free.extend(reversed(numbers))

    def give_last(self, numbers: list[int]) -> None:
        """Takes them back, to be taken after all others."""
        self._free[:0] = reversed(numbers)


class BlockManager:
    """Pools of both caches and of slots. What a plan in flight may read is freed when it reported.

    Tables of shared memory get entries appended only; a freed slot's row is left as it is.
    """

    def __init__(
        self,
        tables: Tables,
        num_gpu_blocks: int,
        num_cpu_pages: int,
        block_size: int,
        page_size: int,
    ) -> None:
        self.tables = tables
        self.block_size = block_size
        self.page_size = page_size
        self.blocks = Pool(num_gpu_blocks)
        self.pages = Pool(num_cpu_pages)
        self.slots = Pool(len(tables.params))
        self.last_reported = 0  # plan id
        self._later: deque[tuple[int, Pool, list[int]]] = deque()

    def capacity(self, places: frozenset[Place]) -> int:
        """Tokens that one sequence can have at most, kept whole in one of ``places``."""
        sizes = {
            Place.GPU: self.blocks.total * self.block_size,
            Place.CPU: self.pages.total * self.page_size,
        }
        return max(sizes[place] for place in places)

    def open_slot(self, seq: Sequence) -> None:
        """Gives the sequence a row of the table, with its sampling parameters in it."""
        (seq.slot,) = self.slots.take(1)
        row = self.tables.params[seq.slot]
        for name in ("seed", "temperature", "top_p", "min_p", "top_k"):
            row[name] = getattr(seq.sampling, name)
        row["features"] = features = seq.sampling.features
        if features:
            self._put_features(row, self.tables.bias[seq.slot], seq)

    @staticmethod
    def _put_features(row: Any, bias: npt.NDArray[Any], seq: Sequence) -> None:
        sampling = seq.sampling
        row["n_prompt"] = seq.num_prompt
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            row[name] = getattr(sampling, name)
        row["n_logprobs"] = sampling.logprobs or 0
        row["n_prompt_logprobs"] = sampling.prompt_logprobs or 0
        biases = [(token, -math.inf) for token in sampling.held_back]
        biases.extend(sampling.logit_bias)
        bias[: len(biases)] = biases
        row["n_stop"], row["n_biases"] = len(sampling.held_back), len(sampling.logit_bias)
        row["min_len"] = seq.num_prompt + sampling.min_tokens

    def grow(self, seq: Sequence, place: Place) -> None:
        """Makes room for all tokens of ``seq`` in ``place``."""
        if place is Place.GPU:
            held, pool, size, table = seq.blocks, self.blocks, self.block_size, "block_table"
        else:
            held, pool, size, table = seq.pages, self.pages, self.page_size, "page_table"
        count = -(-seq.num_planned // size) - len(held)
        if count > 0:
            more = pool.take(count)
            row = getattr(self.tables, table)[seq.slot]
            row[len(held) : len(held) + len(more)] = more
            held.extend(more)

    def swap_out(self, seq: Sequence) -> None:
        """GPU to CPU. The blocks are free for this very plan: swaps out come before all else.

        Whoever writes them waits for the copy, so all others are taken first.
        """
        self.grow(seq, Place.CPU)
        self.blocks.give_last(seq.blocks)
        seq.blocks = []
        seq.place = Place.CPU

    def swap_in(self, seq: Sequence, plan_id: int) -> None:
        """CPU to GPU. The pages are read by plan ``plan_id`` and free after it."""
        self.grow(seq, Place.GPU)
        self._release(self.pages, seq.pages, plan_id)
        seq.pages = []
        seq.place = Place.GPU

    def drop(self, seq: Sequence, state: State) -> None:
        """Takes everything back from a preempted or finished sequence."""
        slots = [] if seq.slot is None else [seq.slot]
        for pool, numbers in (
            (self.blocks, seq.blocks),
            (self.pages, seq.pages),
            (self.slots, slots),
        ):
            self._release(pool, numbers, seq.last_plan)
        seq.blocks, seq.pages, seq.slot = [], [], None
        seq.place, seq.num_computed, seq.state = Place.NOWHERE, 0, state
        seq.pending, seq.skipped, seq.ride = 0, 0, 0
        seq.epoch += 1

    @property
    def has_deferred(self) -> bool:
        """Something becomes free when a plan in flight reports."""
        return bool(self._later)

    def reported(self, plan_id: int) -> None:
        """Plan ``plan_id`` and all before it are over."""
        self.last_reported = plan_id
        while self._later and self._later[0][0] <= plan_id:
            _, pool, numbers = self._later.popleft()
            pool.give(numbers)

    def _release(self, pool: Pool, numbers: list[int], plan_id: int) -> None:
        if not numbers:
            return
        if plan_id <= self.last_reported:
            pool.give(numbers)
        else:
            self._later.append((plan_id, pool, numbers))
