"""Checks a plan against the contract of ``protos/wire.hpp`` before anything is computed.

A bad plan is a bug of the server; running it would write into other sequences' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import BadPlanError
from neo_native import RowKind, SwapKind

if TYPE_CHECKING:
    from neo_native import Sequences, StepSlot

Array = npt.NDArray[Any]


UNKNOWN_TOKEN = -1  # of a decode: what its slot's latest row that sampled gave


@dataclass(frozen=True)
class PlanLimits:
    """What a plan may name."""

    max_rows: int
    max_tokens: int
    max_swaps: int
    max_slots: int
    block_size: int
    max_blocks: int
    num_blocks: int
    page_size: int
    max_pages: int
    num_pages: int
    max_positions: int
    vocab_size: int
    rank: int = 0
    ride_groups: int = 0  # 0: no riders
    ride_capacity: int = 0  # places of a group

    @staticmethod
    def from_geometry(
        geometry: Array, num_blocks: int, max_positions: int, vocab_size: int
    ) -> PlanLimits:
        """``geometry``: 0-d array of ``geometry_dtype``."""
        names = ["max_rows", "max_tokens", "max_swaps", "max_slots", "block_size", "max_blocks"]
        names += ["page_size", "max_pages", "rank", "ride_groups", "ride_capacity"]
        return PlanLimits(
            **{name: int(geometry[name]) for name in names},
            num_pages=int(geometry["n_pages"]),
            num_blocks=num_blocks,
            max_positions=max_positions,
            vocab_size=vocab_size,
        )


def check_plan(step: StepSlot, sequences: Sequences, limits: PlanLimits) -> None:
    """Raises ``BadPlanError`` that names the plan, the field, the value and the limit."""
    check = _Check(int(step.header["plan_id"]))
    n_rows = [int(n) for n in step.header["n_rows"]]
    n_tokens, n_swaps = int(step.header["n_tokens"]), int(step.header["n_swaps"])
    check.equal("rank", int(step.header["rank"]), limits.rank)
    check.at_most("n_rows", sum(n_rows), limits.max_rows)
    check.at_most("n_tokens", n_tokens, limits.max_tokens)
    check.at_most("n_swaps", n_swaps, limits.max_swaps)
    rows, swaps = step.rows[: sum(n_rows)], step.swaps[:n_swaps]
    parts = np.split(rows, np.cumsum(n_rows)[:-1])
    _check_kinds(check, parts[:2])
    _check_rows(check, rows, n_tokens, limits)
    _check_riders(check, parts[2], limits)
    tokens = step.tokens[:n_tokens].copy()
    decodes = rows["token_at"][rows["kind"] >= RowKind.DECODE_GPU]
    tokens[decodes[tokens[decodes] == UNKNOWN_TOKEN]] = 0
    check.below("token", tokens.view(np.uint32), limits.vocab_size)
    check.below("swap slot", swaps["slot"], limits.max_slots)
    check.below("swap kind", swaps["kind"], len(SwapKind))
    check.distinct("swap slot", swaps["slot"])
    check.at_most("swap n_tokens", swaps["n_tokens"], limits.max_positions)
    _check_tables(check, rows, swaps, sequences, limits)


def _check_kinds(check: _Check, batches: list[Array]) -> None:
    for part in batches:
        check.at_most("kind", part["kind"], RowKind.DECODE_CPU)
        if (np.diff(part["kind"].astype(np.int64)) < 0).any():
            check.fail(f"kinds {part['kind'].tolist()} of a sub-batch are not in order")


def _check_riders(check: _Check, rows: Array, limits: PlanLimits) -> None:
    if not len(rows):
        return
    if not limits.ride_groups:
        check.fail(f"{len(rows)} riders; this worker takes none")
    check.at_least("kind of a rider", rows["kind"], RowKind.RIDE_CPU)
    check.at_most("kind of a rider", rows["kind"], RowKind.RIDE_CPU)
    check.below("stage", rows["stage"], limits.ride_groups)
    check.below("place", rows["place"], limits.ride_groups * limits.ride_capacity)
    places, stages = rows["place"].astype(np.int64), rows["stage"].astype(np.int64)
    if (np.diff(places) <= 0).any():
        check.fail(f"places {places.tolist()} of riders are not in order")
    groups, first = np.unique(places // limits.ride_capacity, return_index=True)
    if (stages[first][np.searchsorted(groups, places // limits.ride_capacity)] != stages).any():
        check.fail(f"riders of one group have stages {stages.tolist()} at places {places.tolist()}")
    check.distinct("stage of two groups", stages[first])
    if ((rows["sample"] == 1) != (stages == limits.ride_groups - 1)).any():
        check.fail(f"sample of riders is {rows['sample'].tolist()} at stages {stages.tolist()}")


def _check_rows(check: _Check, rows: Array, n_tokens: int, limits: PlanLimits) -> None:
    check.below("slot", rows["slot"], limits.max_slots)
    check.distinct("slot", rows["slot"])
    counts = rows["n_new"].astype(np.int64)
    check.at_least("n_new", counts, 1)
    check.at_most("n_new of a decode", counts[rows["kind"] >= RowKind.DECODE_GPU], 1)
    check.at_most("start of a row", rows["start"], limits.max_positions)
    check.at_most("start + n_new", rows["start"] + counts, limits.max_positions)
    check.equal("sum of n_new", int(counts.sum()), n_tokens)
    check.at_most("token_at + n_new", rows["token_at"] + counts, n_tokens)
    check.below("sample", rows["sample"], 2)


def _check_tables(
    check: _Check, rows: Array, swaps: Array, sequences: Sequences, limits: PlanLimits
) -> None:
    kinds, ends = rows["kind"], rows["start"].astype(np.int64) + rows["n_new"]
    on_gpu = (kinds == RowKind.PREFILL_GPU) | (kinds == RowKind.DECODE_GPU)
    moved = swaps["slot"], swaps["n_tokens"].astype(np.int64)
    for name, chosen, table, size, columns, limit in (
        ("block", on_gpu, sequences.block_table, limits.block_size, limits.max_blocks,
         limits.num_blocks),
        ("page", ~on_gpu, sequences.page_table, limits.page_size, limits.max_pages,
         limits.num_pages),
    ):  # fmt: skip
        slots = np.concatenate((rows["slot"][chosen], moved[0]))
        used = -(-np.concatenate((ends[chosen], moved[1])) // size)
        check.at_most(f"{name}s of a slot", used, columns)
        entries = table[slots, : int(used.max(initial=0))]
        named = np.arange(entries.shape[1]) < used[:, None]
        check.below(name, entries[named], limit)


class _Check:
    """Comparisons over scalars and columns; the first that fails raises."""

    def __init__(self, plan_id: int) -> None:
        self._plan_id = plan_id

    def fail(self, message: str) -> None:
        raise BadPlanError(f"plan {self._plan_id}: {message}")

    def equal(self, name: str, value: int, wanted: int) -> None:
        if value != wanted:
            self.fail(f"{name} is {value}, expected {wanted}")

    def at_most(self, name: str, values: Array | int, limit: int) -> None:
        largest = values if isinstance(values, int) else int(values.max(initial=0))
        if largest > limit:
            self.fail(f"{name} is {largest}; the limit is {limit}")

    def at_least(self, name: str, values: Array, limit: int) -> None:
        smallest = int(values.min(initial=limit))
        if smallest < limit:
            self.fail(f"{name} is {smallest}; the least is {limit}")

    def below(self, name: str, values: Array, limit: int) -> None:
        self.at_most(name, values, limit - 1)

    def distinct(self, name: str, values: Array) -> None:
        ordered = np.sort(values)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            self.fail(f"{name} {int(ordered[1:][twice][0])} is named twice")
