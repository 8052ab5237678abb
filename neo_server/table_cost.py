"""A cost model from measured tables, as a gpu worker profiles them at its start."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(ge=0.0)]
MAX_POINTS = 60


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Curve(_Frozen):
    """Seconds over one quantity, linear between its points and beyond the last two."""

    x: tuple[float, ...] = Field(min_length=1)
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _ordered(self) -> Curve:
        if len(self.x) != len(self.seconds) or any(a >= b for a, b in pairwise(self.x)):
            raise ValueError(f"x is {self.x}, seconds {self.seconds}: not as many growing numbers")
        return self

    @cached_property
    def _line(self) -> _Line:
        return _Line(self.x, self.seconds)

    def at(self, x: float) -> float:
        """Never below zero, nor below the first point."""
        return self._line.at(x)


class Surface(_Frozen):
    """Seconds over rows and tokens per row, linear in both."""

    rows: tuple[float, ...] = Field(min_length=1)
    tokens_per_row: tuple[float, ...] = Field(min_length=1)
    seconds: tuple[tuple[Seconds, ...], ...]  # [rows][tokens_per_row]

    @model_validator(mode="after")
    def _complete(self) -> Surface:
        widths = {len(line) for line in self.seconds}
        if len(self.seconds) != len(self.rows) or widths != {len(self.tokens_per_row)}:
            raise ValueError("seconds is not a table of rows by tokens_per_row")
        return self

    @cached_property
    def _lines(self) -> tuple[_Line, ...]:
        return tuple(_Line(self.tokens_per_row, line) for line in self.seconds)

    def at(self, rows: float, tokens: float) -> float:
        """``tokens`` of all rows together."""
        x, lines = self.rows, self._lines
        each = tokens / rows if rows else 0.0
        i = bisect_right(x, rows)
        if i == 0 or len(x) == 1:
            return lines[0].at(each)
        i = min(i, len(x) - 1)
        low = lines[i - 1].at(each)
        slope = (lines[i].at(each) - low) / (x[i] - x[i - 1])
        return max(low + slope * (rows - x[i - 1]), 0.0)


class _Line:
    """Linear between points and beyond the last two; the slopes are divided once.

    A plan asks for hundreds of these, so this is most of the time that ``neo`` takes.
    """

    __slots__ = ("_first", "_last", "_slopes", "_x", "_y")

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self._x, self._y = x, y
        self._first, self._last = x[0], len(x) - 1
        self._slopes = [
            (d - c) / (b - a) for (a, b), (c, d) in zip(pairwise(x), pairwise(y), strict=True)
        ]

    def at(self, x: float) -> float:
        """Never below zero, nor below the first point."""
        if x <= self._first or not self._last:
            return self._y[0]
        i = min(bisect_right(self._x, x), self._last) - 1
        return max(self._y[i] + self._slopes[i] * (x - self._x[i]), 0.0)


class ProfileKey(_Frozen):
    """What a table holds for, and nothing else."""

    model: str  # digest of its config.json
    gpu: str
    cpu: str
    torch_threads: int
    cpu_attn_threads: int  # of all workers together
    tp: int
    dtype: str
    kv_dtype: str
    max_num_batched_tokens: int
    ride_capacity: int = 0
    revision: int = 1  # of what the figures mean
    offloads: bool = True  # False: times of what offloading takes are none


class ProfileTable(_Frozen):
    """What a gpu worker measured: per layer, but for ``head``."""

    key: ProfileKey
    num_layers: Annotated[int, Field(gt=0)]
    overlaps_transfers: bool
    linear: Curve  # over tokens
    prefill_attn: Curve  # over query-key pairs
    gpu_attn: Surface
    cpu_attn: Surface | None  # None: no worker was there
    handoff: Curve  # over rows
    ride_handoff: Curve | None = None  # over riders of a group; None: as ``handoff``
    staging: Curve | None = None  # over tokens; None: as ``transfer``
    storing: Curve | None = None  # over tokens; None: copies move them
    transfer: Curve  # over tokens
    head: Curve  # over sampled rows

    @property
    def num_points(self) -> int:
        """Measurements in it."""
        curves = [self.linear, self.prefill_attn, self.handoff, self.transfer, self.head]
        curves += [c for c in (self.ride_handoff, self.staging, self.storing) if c is not None]
        surfaces = [s for s in (self.gpu_attn, self.cpu_attn) if s is not None]
        return sum(len(c.x) for c in curves) + sum(
            len(s.rows) * len(s.tokens_per_row) for s in surfaces
        )

    @staticmethod
    def parse(text: str) -> ProfileTable:
        """From a worker's JSON. Raises ``ValueError``."""
        table = ProfileTable.model_validate(json.loads(text))
        if table.num_points > MAX_POINTS:
            raise ValueError(f"profile has {table.num_points} points; the limit is {MAX_POINTS}")
        return table


class TableCost:
    """``CostModel`` over a table; CPU attention follows the number of live threads."""

    def __init__(
        self,
        table: ProfileTable,
        cpu_threads: Callable[[], int] | None = None,
        scale: float = 1.0,
    ) -> None:
        """``cpu_threads``: alive now. ``scale``: of every time, to try a wrong profile."""
        self.table = table
        self._cpu_threads = cpu_threads or (lambda: table.key.cpu_attn_threads)
        self._scale = scale
        self.refresh()

    def refresh(self) -> None:
        """Looks how many threads live; once per plan, since it reads shared memory."""
        alive = self._cpu_threads()
        self._cpu_share = max(self.table.key.cpu_attn_threads, 1) / alive if alive else 0.0

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.table.num_layers

    @property
    def overlaps_transfers(self) -> bool:
        """As measured."""
        return self.table.overlaps_transfers

    @property
    def ride_places(self) -> float:
        """A captured graph has them all."""
        return self.table.key.ride_capacity if self.table.overlaps_transfers else 0.0

    def linear(self, tokens: float) -> float:
        """T_l."""
        return self._scale * self.table.linear.at(tokens)

    def prefill_attn(self, pairs: float) -> float:
        """Of that many query-key pairs."""
        return self._scale * self.table.prefill_attn.at(pairs)

    def gpu_attn(self, rows: float, tokens: float) -> float:
        """T_ga of decodes."""
        return self._scale * self.table.gpu_attn.at(rows, tokens)

    def cpu_attn(self, rows: float, tokens: float) -> float:
        """T_ca."""
        if self.table.cpu_attn is None or self._cpu_share == 0.0:
            return float("inf")
        return self._scale * self._cpu_share * self.table.cpu_attn.at(rows, tokens)

    def ride_attn(self, rows: float, tokens: float) -> float:
        """T_ca of riders: at first as of rows of one layer."""
        return self.cpu_attn(rows, tokens)

    def handoff(self, rows: float) -> float:
        """Of one sub-batch."""
        return self._scale * self.table.handoff.at(rows)

    def ride_handoff(self, rows: float) -> float:
        """Of one group of riders."""
        if self.table.ride_handoff is None:
            return self.handoff(rows) if rows else 0.0
        return self._scale * self.table.ride_handoff.at(rows)

    def transfer(self, tokens: float) -> float:
        """Between the caches."""
        return self._scale * self.table.transfer.at(tokens)

    def staging(self, tokens: float) -> float:
        """Of earlier chunks; where it was not measured, as any copy between the caches."""
        if self.table.staging is None:
            return self.transfer(tokens)
        return self._scale * self.table.staging.at(tokens)

    def storing(self, tokens: float) -> float:
        """Of prefills on the CPU."""
        return self._scale * self.table.storing.at(tokens) if self.table.storing else 0.0

    def head(self, sampled: float) -> float:
        """Per iteration."""
        return self._scale * self.table.head.at(sampled)
