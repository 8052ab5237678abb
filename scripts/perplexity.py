"""Perplexity of a text when all decode attention runs on the CPU workers, by CPU-cache dtype.

The text is cut into sequences that are decoded side by side, token by token and teacher-forced, by
the engine's own executor, exchange and attention threads. The same with all attention on the
device's side is the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

import neo_native as native
from gpu_worker import ops
from gpu_worker.batch import PlanReader
from gpu_worker.executor import Executor
from gpu_worker.geometry_check import WIRE_DTYPES, WIRE_KV_DTYPES
from gpu_worker.kv_pool import GpuCache
from gpu_worker.model import LlamaModel
from gpu_worker.offload import Offload
from gpu_worker.plan_check import PlanLimits
from gpu_worker.weights import TORCH_DTYPES, LlamaWeights, load_weights
from neo_native import Array, RowKind, RowStatus, segments
from protos.config import DType, KvCacheDType
from protos.model_config import ModelConfig

CPU = torch.device("cpu")
BLOCK_SIZE, PAGE_SIZE = 16, 64
TIMEOUT_S = 600.0
TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "harbour.txt"


@dataclass(frozen=True)
class Run:
    """What to measure: where decode attention runs, and what the CPU-cache holds."""

    on_cpu: bool
    kv_dtype: KvCacheDType  # of the CPU-cache; unused when `on_cpu` is false

    @property
    def name(self) -> str:
        """For people."""
        return f"cpu {self.kv_dtype.value}" if self.on_cpu else "gpu side"


def make_geometry(config: ModelConfig, dtype: DType, run: Run, rows: int, length: int) -> Array:
    """Room for `rows` sequences of `length` tokens."""
    pages, blocks = -(-length // PAGE_SIZE), -(-length // BLOCK_SIZE)
    return native.make_geometry(
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        act_dtype=WIRE_DTYPES[dtype],
        kv_dtype=WIRE_KV_DTYPES[run.kv_dtype],
        block_size=BLOCK_SIZE,
        page_size=PAGE_SIZE,
        n_pages=rows * pages,
        max_slots=rows,
        max_rows=rows,
        max_tokens=rows,
        max_blocks=blocks,
        max_pages=pages,
        max_tasks=4 * rows * config.num_key_value_heads,
        n_plans=2,
        max_workers=1,
    )


class Scorer:
    """An engine without a server: one plan per position, the same for every sequence."""

    def __init__(
        self, weights: LlamaWeights, config: ModelConfig, made: segments.SegmentSet, dtype: DType
    ) -> None:
        geometry = made.geometry
        rows, length = int(geometry["max_rows"]), int(geometry["max_blocks"]) * BLOCK_SIZE
        self._sequences = native.Sequences(made.sequences, geometry)
        for table in (self._sequences.block_table, self._sequences.page_table):
            table[:] = np.arange(table.size, dtype=np.uint32).reshape(table.shape)
        self._sequences.params["top_p"] = 1.0
        model = LlamaModel(config, weights, ops.select(CPU), length)
        self._logits: list[torch.Tensor] = []
        compute = model.logits

        def recorded(residual: torch.Tensor) -> torch.Tensor:
            self._logits.append(compute(residual))
            return self._logits[-1]

        model.logits = recorded  # type: ignore[method-assign]
        control = native.Control(made.control)
        blocks = rows * int(geometry["max_blocks"])
        cache = GpuCache(config, blocks, BLOCK_SIZE, TORCH_DTYPES[dtype], CPU)
        offload = Offload(
            native.Exchange(control, made.work, made.exchange, geometry),
            native.CpuCache(made.cpu_cache, self._sequences, geometry),
            geometry,
            TORCH_DTYPES[dtype],
            CPU,
            TIMEOUT_S,
        )
        self._executor = Executor(model, cache, offload)
        limits = PlanLimits.from_geometry(geometry, blocks, length, config.vocab_size)
        self._reader = PlanReader(self._sequences, limits, CPU)

    def step(self, position: int, tokens: Array, kind: RowKind) -> torch.Tensor:
        """Logits, [sequences, vocabulary], after one token of every sequence."""
        rows = np.zeros(len(tokens), native.step_row_dtype)
        for i in range(len(tokens)):
            rows[i] = (i, kind, position, 1, i, 1, 0, 0)
        header = np.zeros((), native.step_header_dtype)
        header["plan_id"], header["n_tokens"] = position + 1, len(tokens)
        header["n_rows"][0] = len(tokens)
        swaps = np.zeros(0, native.swap_dtype)
        step: Any = SimpleNamespace(header=header, rows=rows, swaps=swaps, tokens=tokens)
        self._logits.clear()
        outcome = self._executor.run(self._reader.read(step))
        if not (outcome.status == RowStatus.SAMPLED).all():
            raise RuntimeError(f"position {position}: rows were given up, {outcome.status}")
        return torch.cat(self._logits)


@contextmanager
def attention_threads(made: segments.SegmentSet, n: int) -> Iterator[None]:
    """A cpu worker in this process."""
    worker = native.AttentionWorker(
        native.Control(made.control),
        *(made.work, made.exchange, made.cpu_cache, made.sequences),
        *(0, n),
    )
    worker.start()
    try:
        yield
    finally:
        worker.stop()


def mean_loss(
    weights: LlamaWeights, config: ModelConfig, tokens: Array, dtype: DType, run: Run, threads: int
) -> float:
    """Mean negative log-likelihood of every token but each sequence's first, in nats.

    tokens: int32 [sequences, length].
    """
    prefill, decode = (
        (RowKind.PREFILL_CPU, RowKind.DECODE_CPU)
        if run.on_cpu
        else (RowKind.PREFILL_GPU, RowKind.DECODE_GPU)
    )
    made = segments.create_all(make_geometry(config, dtype, run, *tokens.shape))
    total = 0.0
    try:
        with attention_threads(made, threads):
            scorer = Scorer(weights, config, made, dtype)
            for position in range(tokens.shape[1] - 1):
                kind = decode if position else prefill
                logits = scorer.step(position, tokens[:, position], kind)
                target = torch.from_numpy(tokens[:, position + 1].astype(np.int64))
                loss = torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum")
                total += float(loss)
    finally:
        segments.unlink_all(made)
        made.close()
    return float(total / (tokens.shape[0] * (tokens.shape[1] - 1)))


def read_tokens(model: Path, text: Path, length: int) -> Array:
    """The text's tokens as int32 [sequences, length]; what is left over is dropped."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = np.array(tokenizer.encode(text.read_text(encoding="utf-8")).ids, np.int32)
    if len(ids) < length:
        raise SystemExit(f"{text} has {len(ids)} tokens; --length is {length}")
    return ids[: len(ids) // length * length].reshape(-1, length)


def main() -> None:
    """Command line; exit status 1 when int8 differs from bfloat16 by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a local Hugging Face directory")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--dtype", type=DType, default=DType.FLOAT32, help="of activations")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bound", type=float, default=0.5, help="percent, int8 against bfloat16")
    parser.add_argument("--json", action="store_true", help="one line per configuration")
    arguments = parser.parse_args()
    config = ModelConfig.from_pretrained(arguments.model)
    tokens = read_tokens(arguments.model, arguments.text, arguments.length)
    weights = load_weights(arguments.model, config, TORCH_DTYPES[arguments.dtype], CPU)
    own = KvCacheDType(arguments.dtype.value)
    kinds = dict.fromkeys((own, KvCacheDType.BFLOAT16, KvCacheDType.INT8))
    runs = [Run(False, own), *(Run(True, kind) for kind in kinds)]
    found: dict[str, float] = {}
    for run in runs:
        loss = mean_loss(weights, config, tokens, arguments.dtype, run, arguments.threads)
        found[run.name] = math.exp(loss)
        percent = 100 * (found[run.name] / found["gpu side"] - 1)
        line = {"run": run.name, "perplexity": found[run.name], "percent_of_gpu_side": percent}
        if arguments.json:
            print(json.dumps({**line, "sequences": tokens.shape[0], "length": tokens.shape[1]}))
        else:
            print(f"{run.name:14} {found[run.name]:9.4f}  {percent:+.3f} % of gpu side", flush=True)
    difference = 100 * (found["cpu int8"] / found["cpu bfloat16"] - 1)
    if not arguments.json:
        print(f"int8 against bfloat16: {difference:+.3f} % (bound {arguments.bound} %)")
    if not abs(difference) < arguments.bound:
        sys.exit(1)


if __name__ == "__main__":
    main()
