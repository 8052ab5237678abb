"""Perplexity of a text when decode attention runs on the CPU workers, by CPU-cache dtype.

The text is cut into sequences that are decoded side by side, token by token and teacher-forced, by
the engine's own executor, exchange and attention threads. The same with all attention on the
device's side is the reference. With ``--every-way`` decode attention is also shared by both sides,
in one batch and in two, and on CUDA with and without graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

import neo_native as native
from gpu_worker import ops
from gpu_worker.backends import Parts, make_backend
from gpu_worker.model import LlamaModel
from gpu_worker.weights import TORCH_DTYPES, LlamaWeights, load_weights
from neo_native import Array, RowKind, RowStatus, segments
from neo_server.geometry import geometry_fields
from protos.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KvCacheDType,
    SchedulerConfig,
    WorkerConfig,
)
from protos.model_config import ModelConfig

BLOCK_SIZE, PAGE_SIZE = 16, 64
TIMEOUT_S = 60.0
GIB = 1 << 30
TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "harbour.txt"


@dataclass(frozen=True)
class Run:
    """What to measure: where decode attention runs, how, and what the CPU-cache holds."""

    cpu_share: float  # of the sequences: 0, 0.5 or 1
    kv_dtype: KvCacheDType  # of the CPU-cache; unused when none of them is there
    batches: int = 1
    eager: bool = False  # no CUDA graphs
    device: str = "cpu"

    @property
    def name(self) -> str:
        """For people."""
        place = {0.0: "gpu side", 1.0: f"cpu {self.kv_dtype.value}"}.get(
            self.cpu_share, f"mixed {self.kv_dtype.value}"
        )
        how = ", two batches" if self.batches == 2 else ""
        return place + how + (", eager" if self.eager else "")

    def on_cpu(self, n: int) -> list[bool]:
        """Which of ``n`` sequences decode on the CPU: every other one where both sides do."""
        return [i % 2 < 2 * self.cpu_share for i in range(n)]


def make_config(
    config: ModelConfig, dtype: DType, run: Run, rows: int, length: int
) -> EngineConfig:
    """Room for `rows` sequences of `length` tokens on both sides."""
    pages, blocks = -(-length // PAGE_SIZE), -(-length // BLOCK_SIZE)
    row = run.kv_dtype.row_bytes(config.head_dim)
    page = PAGE_SIZE * 2 * config.num_hidden_layers * config.num_key_value_heads * row
    return EngineConfig(
        model_path="",
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=rows * blocks,
            kv_offloading_size=(rows * pages + 0.5) * page / GIB,
            cpu_kv_page_size=PAGE_SIZE,
            cpu_kv_cache_dtype=run.kv_dtype,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=max(rows, length), max_model_len=length
        ),
        worker=WorkerConfig(
            device="cuda" if run.device == "cuda" else "cpu",
            dtype=dtype,
            enforce_eager=run.eager,
            cpu_attn_timeout_s=TIMEOUT_S,
            spin_us=200 if run.device == "cuda" else 0,
        ),
    )


class Scorer:
    """An engine without a server: one plan per position, the same for every sequence."""

    def __init__(
        self,
        weights: LlamaWeights,
        config: ModelConfig,
        engine: EngineConfig,
        made: segments.SegmentSet,
    ) -> None:
        model = LlamaModel(
            config, weights, ops.select(weights.embedding.device), engine.scheduler.max_model_len
        )
        self._logits: list[torch.Tensor] = []
        compute = model.logits

        def recorded(residual: torch.Tensor) -> torch.Tensor:
            self._logits.append(compute(residual))
            return self._logits[-1]

        model.logits = recorded  # type: ignore[method-assign]
        parts = Parts(engine, model, made, native.Control(made.control), lambda: True)
        self._sequences = parts.sequences()
        for table in (self._sequences.block_table, self._sequences.page_table):
            table[:] = np.arange(table.size, dtype=np.uint32).reshape(table.shape)
        self._sequences.params["top_p"] = 1.0
        self._backend = make_backend(parts)
        self._plan_id = 0

    def step(
        self, position: int, tokens: Array, batches: Sequence[Sequence[tuple[int, RowKind]]]
    ) -> torch.Tensor:
        """Logits, [sequences, vocabulary], after one token of every sequence.

        tokens: int32 [sequences]; batches: sequence and kind of each row, by sub-batch.
        """
        rows = np.zeros(len(tokens), native.step_row_dtype)
        order = [row for batch in batches for row in batch]
        rows["slot"], rows["kind"] = zip(*order, strict=True)
        rows["start"], rows["n_new"], rows["sample"] = position, 1, 1
        rows["token_at"] = np.arange(len(tokens))
        header = np.zeros((), native.step_header_dtype)
        self._plan_id += 1
        header["plan_id"], header["n_tokens"] = self._plan_id, len(tokens)
        header["n_rows"][: len(batches)] = [len(batch) for batch in batches]
        swaps = np.zeros(0, native.swap_dtype)
        step: Any = SimpleNamespace(
            header=header, rows=rows, swaps=swaps, tokens=tokens[rows["slot"].astype(np.int64)]
        )
        self._logits.clear()
        self._backend.runner.submit(self._backend.reader.read(step))
        outcome = self._backend.runner.collect()
        if not (outcome.status == RowStatus.SAMPLED).all():
            raise RuntimeError(f"position {position}: rows were given up, {outcome.status}")
        return self._gathered(batches)[np.argsort(rows["slot"])]

    def _gathered(self, batches: Sequence[Sequence[tuple[int, RowKind]]]) -> torch.Tensor:
        """Logits in the order of the rows."""
        kept = getattr(self._backend.runner, "logits", None)  # the CUDA path's
        if kept is None:
            return torch.cat(self._logits).cpu()
        return torch.cat([kept(i, len(batch)) for i, batch in enumerate(batches)]).cpu()


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


def rows_of(run: Run, n: int, prefill: bool) -> list[list[tuple[int, RowKind]]]:
    """Sequence and kind of each row by sub-batch, in the order of the wire format."""
    gpu, cpu = (
        (RowKind.PREFILL_GPU, RowKind.PREFILL_CPU)
        if prefill
        else (RowKind.DECODE_GPU, RowKind.DECODE_CPU)
    )
    rows = [(i, cpu if away else gpu) for i, away in enumerate(run.on_cpu(n))]
    size = -(-n // run.batches)
    batches = [rows[at : at + size] for at in range(0, n, size)]
    return [sorted(batch, key=lambda row: int(row[1])) for batch in batches]


def mean_loss(
    weights: LlamaWeights, config: ModelConfig, tokens: Array, dtype: DType, run: Run, threads: int
) -> float:
    """Mean negative log-likelihood of every token but each sequence's first, in nats.

    tokens: int32 [sequences, length].
    """
    n, length = tokens.shape
    engine = make_config(config, dtype, run, n, length)
    made = segments.create_all(native.make_geometry(**geometry_fields(engine, config, 1)))
    total = 0.0
    try:
        with attention_threads(made, threads):
            scorer = Scorer(weights, config, engine, made)
            for position in range(length - 1):
                batches = rows_of(run, n, prefill=position == 0)
                logits = scorer.step(position, tokens[:, position], batches)
                target = torch.from_numpy(tokens[:, position + 1].astype(np.int64))
                loss = torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum")
                total += float(loss)
    finally:
        segments.unlink_all(made)
        made.close()
    return float(total / (n * (length - 1)))


def runs_of(dtype: DType, device: str, every_way: bool) -> list[Run]:
    """The reference first."""
    own = KvCacheDType(dtype.value)
    kinds = dict.fromkeys((own, KvCacheDType.BFLOAT16, KvCacheDType.INT8))
    runs = [Run(0.0, own, device=device), *(Run(1.0, kind, device=device) for kind in kinds)]
    if not every_way:
        return runs
    runs += [
        Run(share, own, batches, device=device)
        for share, batches in ((0.0, 2), (0.5, 1), (0.5, 2), (1.0, 2))
    ]
    if device == "cuda":
        runs += [replace(run, eager=True) for run in runs]
    return runs


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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--every-way", action="store_true", help="mixed, two batches, no graphs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bound", type=float, default=0.5, help="percent, int8 against bfloat16")
    parser.add_argument("--json", action="store_true", help="one line per configuration")
    arguments = parser.parse_args()
    config = ModelConfig.from_pretrained(arguments.model)
    tokens = read_tokens(arguments.model, arguments.text, arguments.length)
    device = torch.device(arguments.device)
    weights = load_weights(arguments.model, config, TORCH_DTYPES[arguments.dtype], device)
    found: dict[str, float] = {}
    for run in runs_of(arguments.dtype, arguments.device, arguments.every_way):
        loss = mean_loss(weights, config, tokens, arguments.dtype, run, arguments.threads)
        gc.collect()  # the engine's caches, before the next one's
        found[run.name] = math.exp(loss)
        percent = 100 * (found[run.name] / found["gpu side"] - 1)
        line = {"run": run.name, "perplexity": found[run.name], "percent_of_gpu_side": percent}
        if arguments.json:
            print(json.dumps({**line, "sequences": tokens.shape[0], "length": tokens.shape[1]}))
        else:
            print(f"{run.name:28} {found[run.name]:9.4f}  {percent:+.3f} % of gpu side", flush=True)
    difference = 100 * (found["cpu int8"] / found["cpu bfloat16"] - 1)
    if not arguments.json:
        print(f"int8 against bfloat16: {difference:+.3f} % (bound {arguments.bound} %)")
    if not abs(difference) < arguments.bound:
        sys.exit(1)


if __name__ == "__main__":
    main()
