"""An executor on tiny models, fed as the server would feed it, without processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import neo_native as native
from gpu_worker import ops
from gpu_worker.batch import PlanReader
from gpu_worker.executor import Executor, Outcome
from gpu_worker.features import Features
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel
from gpu_worker.offload import Offload
from gpu_worker.plan_check import PlanLimits
from gpu_worker.weights import TORCH_DTYPES, load_weights
from neo_native import RowKind, SwapKind
from neo_native.timeline import Timeline
from protos.config import DType
from protos.model_config import ModelConfig

CPU = torch.device("cpu")
MAX_ROWS, MAX_TOKENS, MAX_SLOTS, MAX_SWAPS = 32, 256, 8, 8
BLOCK_SIZE, PAGE_SIZE, MAX_LEN = 8, 16, 128


@dataclass(frozen=True)
class Row:
    """One row of a plan; ``tokens`` are its new ones."""

    slot: int
    kind: RowKind
    start: int
    tokens: Sequence[int]
    sample: bool = True
    stage: int = 0  # of a rider, as ``place``
    place: int = 0


def make_segment(kind: native.SegmentKind, geometry: Any) -> native.Segment:
    """A segment without a name."""
    fd = os.memfd_create("segment")
    try:
        return native.Segment.create(fd, kind, geometry)
    finally:
        os.close(fd)


def make_geometry(config: ModelConfig, dtype: DType, **overrides: int) -> Any:
    """Small sizes; two workers at most."""
    fields = {
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "act_dtype": native.WireDType[dtype.name],
        "kv_dtype": native.WireDType[dtype.name],
        "block_size": BLOCK_SIZE,
        "page_size": PAGE_SIZE,
        "n_pages": MAX_SLOTS * MAX_LEN // PAGE_SIZE,
        "max_slots": MAX_SLOTS,
        "max_rows": MAX_ROWS,
        "max_tokens": MAX_TOKENS,
        "max_blocks": MAX_LEN // BLOCK_SIZE,
        "max_pages": MAX_LEN // PAGE_SIZE,
        "max_tasks": MAX_ROWS * config.num_key_value_heads * 2,
        "max_swaps": MAX_SWAPS,
        "n_plans": 4,
        "max_workers": 2,
        "lease_us": 200_000,
    }
    return native.make_geometry(**(fields | overrides))


def make_step(
    plan_id: int,
    *sub_batches: Sequence[Row],
    riders: Sequence[Row] = (),
    swaps: Sequence[tuple[int, SwapKind, int]] = (),
    max_rows: int = MAX_ROWS,
    max_tokens: int = MAX_TOKENS,
) -> Any:
    """What the ring would hold. ``swaps``: slot, kind, tokens."""
    step = SimpleNamespace(
        header=np.zeros((), native.step_header_dtype),
        rows=np.zeros(max_rows, native.step_row_dtype),
        swaps=np.zeros(MAX_SWAPS, native.swap_dtype),
        tokens=np.zeros(max_tokens, np.int32),
    )
    at = 0
    parts = [*[*sub_batches, [], []][:2], riders]
    rows = [row for part in parts for row in part]
    for i, row in enumerate(rows):
        step.rows[i] = (row.slot, row.kind, row.start, len(row.tokens), at, row.sample, 0, 0)
        step.rows[i]["stage"], step.rows[i]["place"] = row.stage, row.place
        step.tokens[at : at + len(row.tokens)] = row.tokens
        at += len(row.tokens)
    for i, (slot, kind, n_tokens) in enumerate(swaps):
        step.swaps[i]["slot"], step.swaps[i]["kind"] = slot, kind
        step.swaps[i]["n_tokens"] = n_tokens
    step.header["plan_id"] = plan_id
    step.header["n_rows"] = [len(part) for part in parts]
    step.header["n_tokens"] = at
    step.header["n_swaps"] = len(swaps)
    return step


class Rig:
    """Every slot owns its own blocks and pages, scattered at random."""

    def __init__(
        self,
        folder: Path,
        *,
        cpu_side: Any = None,
        workers: int = 0,
        timeout_s: float = 30.0,
        timeline: Timeline | None = None,
        dtype: DType = DType.FLOAT32,
        **geometry_fields: int,
    ) -> None:
        """``cpu_side``: a fake; otherwise the extension's, with attention threads in-process."""
        self._timeline = timeline
        config = ModelConfig.from_pretrained(folder)
        geometry = make_geometry(config, dtype, **geometry_fields)
        segment = make_segment(native.SegmentKind.SEQUENCES, geometry)
        self.sequences = native.Sequences(segment, geometry)
        num_blocks = MAX_SLOTS * MAX_LEN // BLOCK_SIZE
        self._scatter(num_blocks, int(geometry["n_pages"]))
        weights = load_weights(folder, config, TORCH_DTYPES[dtype], CPU)
        model = LlamaModel(config, weights, ops.select(CPU), MAX_LEN)
        self.model = model
        self.logits: list[torch.Tensor] = []
        self._record_logits(model)
        self.cache = GpuCache(config, num_blocks, BLOCK_SIZE, TORCH_DTYPES[dtype], CPU)
        self._workers: list[Any] = []
        if cpu_side is None:
            cpu_side = self._native_side(geometry, segment, workers, timeout_s)
        self.features = Features(CPU, MAX_SLOTS, MAX_LEN, config.vocab_size, model.logits)
        self.cpu_side = cpu_side
        groups, capacity = (int(geometry[f"ride_{name}"]) for name in ("groups", "capacity"))
        self.executor = Executor(model, self.cache, cpu_side, self.features, groups, capacity)
        limits = PlanLimits.from_geometry(geometry, num_blocks, MAX_LEN, config.vocab_size)
        self.limits = limits
        self.reader = PlanReader(self.sequences, limits, CPU)
        self._plan_id = 0

    def close(self) -> None:
        """Ends the attention threads."""
        for worker in self._workers:
            worker.stop()

    def run(
        self,
        *sub_batches: Sequence[Row],
        riders: Sequence[Row] = (),
        swaps: Sequence[tuple[int, SwapKind, int]] = (),
    ) -> Outcome:
        """Runs one plan of one or two sub-batches; ``self.logits`` gets its sampled rows'."""
        self.logits.clear()
        step = self.step(*sub_batches, riders=riders, swaps=swaps)
        return self.executor.run(self.reader.read(step))

    def step(
        self,
        *sub_batches: Sequence[Row],
        riders: Sequence[Row] = (),
        swaps: Sequence[tuple[int, SwapKind, int]] = (),
    ) -> Any:
        """What the ring would hold."""
        self._plan_id += 1
        return make_step(self._plan_id, *sub_batches, riders=riders, swaps=swaps)

    def _scatter(self, num_blocks: int, num_pages: int) -> None:
        shuffle = np.random.default_rng(7)
        for table, total in (
            (self.sequences.block_table, num_blocks),
            (self.sequences.page_table, num_pages),
        ):
            table[:] = shuffle.permutation(total).reshape(table.shape)
        self.sequences.params["top_p"] = 1.0

    def _record_logits(self, model: LlamaModel) -> None:
        compute = model.logits

        def recorded(residual: torch.Tensor) -> torch.Tensor:
            self.logits.append(compute(residual))
            return self.logits[-1]

        model.logits = recorded  # type: ignore[method-assign]

    def _native_side(
        self, geometry: Any, sequences: native.Segment, workers: int, timeout_s: float
    ) -> Offload:
        control_segment = make_segment(native.SegmentKind.CONTROL, geometry)
        control = native.Control(control_segment)
        work = make_segment(native.SegmentKind.WORK, geometry)
        exchange = make_segment(native.SegmentKind.EXCHANGE, geometry)
        pages = make_segment(native.SegmentKind.CPU_CACHE, geometry)
        dtype = DType[native.WireDType(int(geometry["act_dtype"])).name]
        for row in range(workers):
            worker = native.AttentionWorker(control, work, exchange, pages, sequences, row, 1, [])
            if self._timeline is not None:
                worker.record(self._timeline.memory)
            worker.start()
            self._workers.append(worker)
        return Offload(
            native.Exchange(control, work, exchange, geometry),
            native.CpuCache(pages, self.sequences, geometry),
            geometry,
            TORCH_DTYPES[dtype],
            CPU,
            timeout_s,
        )
