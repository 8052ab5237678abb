"""What the rows of one plan want beyond drawing a token, read from their slots' parameters.

Built on the host, once per plan, without a loop per token; ``None`` where no row wants anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from neo_native import Feature, RowKind

if TYPE_CHECKING:
    from gpu_worker.batch import PlanColumns
    from neo_native import Sequences

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Recorded:
    """Tokens of one sub-batch, or of a group of riders in stage 0, that penalties will count."""

    at: Ints  # of these tokens
    slots: Ints
    positions: Ints


@dataclass(frozen=True)
class Biases:
    """One entry for each logit that a bias is added to."""

    rows: Ints  # of the sampled rows
    tokens: Ints
    values: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Penalties:
    """Columns over the sampled rows that have a penalty."""

    rows: Ints  # of the sampled rows
    slots: Ints
    lengths: Ints  # tokens so far
    prompts: Ints  # of these, the prompt's
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    repetition: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Reported:
    """Columns over the sampled rows whose log-probabilities are wanted."""

    sampled: Ints  # of the sampled rows
    rows: Ints  # of the plan
    positions: Ints  # of the sampled token
    n_top: Ints


@dataclass(frozen=True)
class PromptPart:
    """A prefill row whose own tokens' log-probabilities are wanted."""

    channel: int
    row: int  # of the plan
    slot: int
    start: int  # position of the row's first token
    tokens: slice  # of the sub-batch
    ids: Ints  # those of the row's tokens that are the prompt's
    n_top: int
    goes_on: bool  # the prompt's next token is in a later plan


@dataclass(frozen=True)
class Wanted:
    """One plan's."""

    recorded: dict[int, Recorded]  # by channel
    biases: Biases | None
    penalties: Penalties | None
    reported: Reported | None
    prompts: tuple[PromptPart, ...]

    @property
    def adjusted(self) -> Ints:
        """Sampled rows whose logits change before a token is drawn."""
        parts = [part.rows for part in (self.biases, self.penalties) if part is not None]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def wanted_by(
    sequences: Sequences,
    rows: PlanColumns,
    sampled: npt.NDArray[np.intp],
    n_rows: Sequence[int],
) -> Wanted | None:
    """``n_rows``: of sub-batch 0 and sub-batch 1, which come first among the plan's rows."""
    features = sequences.params["features"][rows.slots]
    if not features.any():
        return None
    params = sequences.params[rows.slots]
    lengths = rows.starts + rows.counts
    bounds = [0, n_rows[0], n_rows[0] + n_rows[1]]
    chosen = features[sampled]
    return Wanted(
        recorded=_recorded(rows, features, bounds),
        biases=_biases(sequences, rows.slots[sampled], params[sampled], lengths[sampled]),
        penalties=_penalties(rows.slots, params, lengths, sampled, chosen),
        reported=_reported(params, lengths, sampled, chosen),
        prompts=_prompts(rows, params, bounds),
    )


def recorded_riders(sequences: Sequences, rows: PlanColumns, group: slice) -> Recorded | None:
    """Of the tokens of a group of riders, one a row; ``group``: rows of the plan."""
    slots = rows.slots[group]
    at = np.flatnonzero(sequences.params["features"][slots] & Feature.PENALTIES)
    if len(at) == 0:
        return None
    return Recorded(at, slots[at].astype(np.int64), rows.starts[group][at])


def _recorded(rows: PlanColumns, features: Array, bounds: Sequence[int]) -> dict[int, Recorded]:
    counted = np.repeat((features & Feature.PENALTIES) != 0, rows.counts)
    found = {}
    for channel, (low, high) in enumerate(pairwise(rows.first[bounds].tolist())):
        at = np.flatnonzero(counted[low:high])
        if len(at):
            slots = rows.token_slots[low + at].astype(np.int64)
            found[channel] = Recorded(at, slots, rows.token_positions[low + at])
    return found


def _biases(sequences: Sequences, slots: Array, params: Array, lengths: Ints) -> Biases | None:
    """Stop tokens of rows that are still too short, and the biases that hold always."""
    has = (params["features"] & Feature.BIASES) != 0
    stops = np.where(has & (lengths < params["min_len"]), params["n_stop"], 0).astype(np.int64)
    always = np.where(has, params["n_biases"], 0).astype(np.int64)
    first, counts = params["n_stop"] - stops, stops + always
    total = int(counts.sum())
    if total == 0:
        return None
    rows = np.repeat(np.arange(len(slots)), counts)
    within = np.arange(total) - np.repeat(counts.cumsum() - counts, counts)
    entries = sequences.bias[slots[rows], first[rows] + within]
    return Biases(rows, entries["token"].astype(np.int64), entries["bias"].copy())


def _penalties(
    slots: Array, params: Array, lengths: Ints, sampled: Array, features: Array
) -> Penalties | None:
    rows = np.flatnonzero(features & Feature.PENALTIES)
    if len(rows) == 0:
        return None
    of = sampled[rows]
    chosen = params[of]
    return Penalties(
        rows=rows,
        slots=slots[of].astype(np.int64),
        lengths=lengths[of],
        prompts=chosen["n_prompt"].astype(np.int64),
        presence=chosen["presence_penalty"].copy(),
        frequency=chosen["frequency_penalty"].copy(),
        repetition=chosen["repetition_penalty"].copy(),
    )


def _reported(params: Array, lengths: Ints, sampled: Array, features: Array) -> Reported | None:
    at = np.flatnonzero(features & Feature.LOGPROBS)
    if len(at) == 0:
        return None
    rows = sampled[at]
    return Reported(at, rows, lengths[rows], params["n_logprobs"][rows].astype(np.int64))


def _prompts(rows: PlanColumns, params: Array, bounds: Sequence[int]) -> tuple[PromptPart, ...]:
    wants = (params["features"] & Feature.PROMPT_LOGPROBS) != 0
    wants &= (rows.kinds < RowKind.DECODE_GPU) & (rows.starts < params["n_prompt"])
    parts = []
    for row in np.flatnonzero(wants).tolist():
        channel = int(row >= bounds[1])
        base = int(rows.first[bounds[channel]])
        first, end = int(rows.first[row]), int(rows.first[row + 1])
        start, n_prompt = int(rows.starts[row]), int(params["n_prompt"][row])
        ids = rows.token_ids[first : first + min(end - first, n_prompt - start)]
        parts.append(
            PromptPart(
                channel=channel,
                row=row,
                slot=int(rows.slots[row]),
                start=start,
                tokens=slice(first - base, end - base),
                ids=ids,
                n_top=int(params["n_prompt_logprobs"][row]),
                goes_on=start + len(ids) < n_prompt,
            )
        )
    return tuple(parts)
