"""The figures of ``neo bench throughput``: of one work, on an engine that ran nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from neo_server.bench.counters import CpuWork
from neo_server.bench.drive import Recorder
from neo_server.bench.workload import Prompt
from neo_server.metrics import Metrics

_PERCENTILES = (50, 99)
# As ``neo_server.outputs.Finished`` names them, in the order of the figures.
_PLACES = ("gpu_requests", "cpu_requests", "gpu_and_cpu_requests")


def figures(
    begin: float,
    prompts: Sequence[Prompt],
    records: Sequence[Recorder],
    metrics: Metrics,
    cpu: CpuWork,
) -> dict[str, Any]:
    """From the first submission to the last token; ``begin`` by ``time.perf_counter()``."""
    elapsed_s = max(record.times[-1] for record in records) - begin
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    num_output = sum(len(record.times) for record in records)
    tpot = _tpot(records)
    return {
        "requests_per_s": len(records) / elapsed_s,
        "output_tokens_per_s": num_output / elapsed_s,
        "total_tokens_per_s": (num_prompt + num_output) / elapsed_s,
        "elapsed_s": elapsed_s,
        "num_requests": len(records),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "mean_ttft_s": fmean(record.times[0] - begin for record in records),
        "mean_tpot_s": fmean(tpot) if tpot else None,
        "latencies": latencies(begin, records),
        "gpu_busy_share": gpu_busy_share(metrics, elapsed_s),
        "cpu_busy_share": cpu.busy_s / (cpu.threads * elapsed_s) if cpu.threads else 0.0,
        "cpu_kv_bytes_per_s": cpu.kv_bytes / elapsed_s,
        "iterations": dict(metrics.iterations),
        "prefill_iterations": dict(metrics.prefill_iterations),
        "num_gpu_decodes": metrics.num_gpu_decodes,
        "num_cpu_decodes": metrics.num_cpu_decodes,
        "num_preemptions": metrics.num_preemptions,
        "num_swap_outs": metrics.num_swap_outs,
        "num_swap_ins": metrics.num_swap_ins,
        "num_voided_rows": metrics.num_voided_rows,
        "num_wasted_rows": metrics.num_wasted_rows,
    }


def gpu_busy_share(metrics: Metrics, elapsed_s: float) -> float:
    """Time that the gpu worker spent on plans, by its own report; waits for O are in it."""
    return metrics.device_s / elapsed_s


def latencies(begin: float, records: Sequence[Recorder]) -> dict[str, dict[str, Any]]:
    """Percentiles in seconds, of all requests and by where their decode steps ran."""
    by_place: dict[str, list[Recorder]] = {place: [] for place in _PLACES}
    for record in records:
        by_place[_place(record)].append(record)
    return {
        name: {
            "num_requests": len(group),
            **_spread("ttft", [record.times[0] - begin for record in group]),
            **_spread("tpot", _tpot(group)),
        }
        for name, group in {"all": records, **by_place}.items()
    }


def _place(record: Recorder) -> str:
    """A request without a decode step is a GPU-request."""
    gpu_only, cpu_only, both = _PLACES
    if not record.num_cpu_decodes:
        return gpu_only
    return both if record.num_gpu_decodes else cpu_only


def _tpot(records: Sequence[Recorder]) -> list[float]:
    """Of the requests that have a second token."""
    return [
        (record.times[-1] - record.times[0]) / (len(record.times) - 1)
        for record in records
        if len(record.times) > 1
    ]


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    return {
        f"p{p}_{name}_s": float(np.percentile(seconds, p)) if seconds else None
        for p in _PERCENTILES
    }
