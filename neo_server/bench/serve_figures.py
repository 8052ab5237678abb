"""The figures of ``neo bench serve``; their names and definitions are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from neo_server.bench.serve_record import Record

_WIDTH = 50
_SERIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def figures(
    records: Sequence[Record], duration_s: float, percentiles: Sequence[float]
) -> dict[str, Any]:
    """Of the requests that were answered whole; ``duration_s`` from the first sent to the last end.

    Times are in milliseconds; a series without a value has none.
    """
    done = [record for record in records if record.error is None]
    num_input = sum(record.num_prompt for record in done)
    num_output = sum(record.num_output for record in done)
    series = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itls],
        "e2el": [record.e2el for record in done],
    }
    line: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": _most_at_once(done),
    }
    for name, values in series.items():
        line |= _spread(name, values, percentiles)
    line["mean_per_token_latency_ms"] = _mean([record.per_token for record in done])
    line["num_gpu_decodes"] = sum(record.num_gpu_decodes for record in done)
    line["num_cpu_decodes"] = sum(record.num_cpu_decodes for record in done)
    return line


def details(records: Sequence[Record]) -> dict[str, Any]:
    """Of every request, in the order of the data set; times in seconds."""
    good = [record.error is None for record in records]
    return {
        "input_lens": [record.num_prompt for record in records],
        "output_lens": [record.num_output for record in records],
        "ttfts": [r.ttft if ok else None for r, ok in zip(records, good, strict=True)],
        "itls": [record.itls for record in records],
        "errors": [record.error or "" for record in records],
    }


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    ms = 1e3 * np.array(seconds)
    if not len(ms):
        return {}
    line = {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }
    return line | {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}


def _mean(seconds: Sequence[float]) -> float | None:
    return 1e3 * float(np.mean(seconds)) if seconds else None


def _most_at_once(records: Sequence[Record]) -> int:
    """Requests that had been sent and not ended."""
    edges = [(record.begin, 1) for record in records] + [(r.times[-1], -1) for r in records]
    steps = [change for _, change in sorted(edges)]
    return int(np.cumsum(steps).max()) if steps else 0


def print_figures(console: Console, line: dict[str, Any], percentiles: Sequence[float]) -> None:
    """One block of text, as people know it from vLLM."""

    def say(title: str, value: float | None, form: str = ".2f") -> None:
        if value is not None:
            console.print(f"{title:<40} {value:<9{form}}", highlight=False)

    console.print(f"{' Serving Benchmark Result ':=^{_WIDTH}}", highlight=False)
    say("Successful requests:", line["completed"], "d")
    say("Failed requests:", line["failed"], "d")
    say("Maximum request concurrency:", line["max_concurrency"], "d")
    rate = line["request_rate"]
    say("Request rate configured (RPS):", None if rate == "inf" else rate)
    say("Benchmark duration (s):", line["duration"])
    say("Total input tokens:", line["total_input_tokens"], "d")
    say("Total generated tokens:", line["total_output_tokens"], "d")
    say("Request throughput (req/s):", line["request_throughput"])
    say("Output token throughput (tok/s):", line["output_throughput"])
    say("Peak concurrent requests:", line["max_concurrent_requests"], "d")
    say("Total token throughput (tok/s):", line["total_token_throughput"])
    for name, title in _SERIES.items():
        if f"mean_{name}_ms" not in line:
            continue
        console.print(f"{title:-^{_WIDTH}}", highlight=False)
        short = name.upper()
        say(f"Mean {short} (ms):", line[f"mean_{name}_ms"])
        say(f"Median {short} (ms):", line[f"median_{name}_ms"])
        for p in percentiles:
            say(f"P{p:g} {short} (ms):", line[f"p{p:g}_{name}_ms"])
    if line["mean_per_token_latency_ms"] is not None:
        console.print(f"{'Per-token Latency (E2EL / output tokens)':-^{_WIDTH}}", highlight=False)
        say("Mean per-token latency (ms):", line["mean_per_token_latency_ms"])
    decodes = line["num_gpu_decodes"] + line["num_cpu_decodes"]
    if decodes:
        console.print(f"{'Placement of Decode Attention':-^{_WIDTH}}", highlight=False)
        say("GPU decode steps:", line["num_gpu_decodes"], "d")
        say("CPU decode steps:", line["num_cpu_decodes"], "d")
        say("CPU share (%):", 100.0 * line["num_cpu_decodes"] / decodes)
    console.print("=" * _WIDTH, highlight=False)
