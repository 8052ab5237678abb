"""The command ``neo simulate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from neo_server.cost_model import CostModel
from neo_server.errors import ConfigurationError
from neo_server.plan import Mode
from neo_server.roofline import (
    SHAPES,
    ModelShape,
    RooflineCost,
    gpu_cache_tokens,
    load_hardware,
)
from neo_server.simulator.run import ALL_MODES, Report, Setting, simulate
from neo_server.simulator.workload import Arrival, arrivals, limited, read_trace, synthetic
from neo_server.table_cost import ProfileTable, TableCost
from protos.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Request:
    """The flags of ``neo simulate``."""

    hardware: str
    model: str
    policy: list[str] | None
    trace: Path | None
    input_len: int
    output_len: int
    num_requests: int
    request_rate: float | None
    gpu_tokens: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    tpot_slo_ms: float | None
    ttft_slo_ms: float | None
    profile: Path | None
    cpu_bandwidth: float
    cpu_kv_cache_dtype: Literal["auto", "int8"]
    enable_piggyback: bool
    plot: Path | None


def run(request: Request, console: Console) -> None:
    """One line per policy. Raises ``ConfigurationError``."""
    work = _workload(request)
    reports = {
        policy: simulate(_setting(request, policy), work)
        for policy in request.policy or ["gpu-only", "neo"]
    }
    table = Table("policy", "requests/s", "tokens/s", "ms/token", "TTFT p50/p99 s",
                  "TPOT p50/p99 ms", "GPU busy", "CPU busy", "on the CPU")  # fmt: skip
    for policy, report in reports.items():
        table.add_row(policy, *_cells(report))
    console.print(table)
    if request.plot is not None:
        _plot(reports, request.plot)


def _workload(request: Request) -> list[Arrival]:
    if request.trace is None:
        lengths = synthetic(request.input_len, request.output_len, request.num_requests)
    else:
        lengths = limited(read_trace(request.trace), request.max_model_len, request.num_requests)
    return arrivals(lengths, request.request_rate)


def _setting(request: Request, policy: str) -> Setting:
    if request.model not in SHAPES:
        raise ConfigurationError(f"model is {request.model!r}; known are {', '.join(SHAPES)}")
    hardware, shape = load_hardware(request.hardware), SHAPES[request.model]
    fits = gpu_cache_tokens(hardware, shape)
    tokens = fits if request.gpu_tokens is None else request.gpu_tokens
    if tokens < 16:
        raise ConfigurationError(f"{shape.name} leaves {tokens} tokens of GPU-cache; 16 are needed")
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens,
        max_model_len=request.max_model_len,
        enable_chunked_prefill=request.enable_chunked_prefill,
        tpot_slo_s=None if request.tpot_slo_ms is None else request.tpot_slo_ms * 1e-3,
        ttft_slo_s=None if request.ttft_slo_ms is None else request.ttft_slo_ms * 1e-3,
    )
    kv_scale = 0.5 if request.cpu_kv_cache_dtype == "int8" else 1.0
    cpu_tokens = int(shape.tokens_in(hardware.cpu_memory_gb * 1e9) / kv_scale)
    modes = ALL_MODES if request.enable_piggyback else ALL_MODES - {Mode.PIGGYBACK}
    cost: CostModel
    if request.profile is None:
        roofline = RooflineCost(hardware, shape, kv_scale=kv_scale)
        cost = roofline.with_cpu_bandwidth(request.cpu_bandwidth)
    else:
        cost = _measured(request, shape, request.profile)
    return Setting(policy, cost, tokens, cpu_tokens, config, modes)


def _measured(request: Request, shape: ModelShape, path: Path) -> TableCost:
    """Raises ``ConfigurationError`` for a profile of something else."""
    table = ProfileTable.parse(path.read_text(encoding="utf-8"))
    if table.num_layers != shape.layers:
        raise ConfigurationError(
            f"{path} is of {table.num_layers} layers; {shape.name} has {shape.layers}"
        )
    is_int8 = table.key.kv_dtype == "int8"
    if is_int8 != (request.cpu_kv_cache_dtype == "int8"):
        raise ConfigurationError(
            f"cpu_kv_cache_dtype is {request.cpu_kv_cache_dtype!r}; {path} was measured with "
            f"{table.key.kv_dtype!r}"
        )
    if request.cpu_bandwidth != 1.0:
        raise ConfigurationError("cpu_bandwidth is of a hardware's figures; a profile has its own")
    return TableCost(table)


def _cells(report: Report) -> list[str]:
    metrics = report.metrics
    decodes = max(metrics.num_cpu_decodes + metrics.num_gpu_decodes, 1)
    ttft = [report.percentile("ttft_s", share) for share in (50, 99)]
    tpot = [1e3 * report.percentile("tpot_s", share) for share in (50, 99)]
    return [
        f"{report.requests_per_s:.3f}",
        f"{report.output_tokens_per_s:.0f}",
        f"{1e3 * report.mean_per_token_s:.1f}",
        f"{ttft[0]:.2f} / {ttft[1]:.2f}",
        f"{tpot[0]:.1f} / {tpot[1]:.1f}",
        f"{report.gpu_busy_s / report.seconds:.0%}",
        f"{report.cpu_busy_s / report.seconds:.0%}",
        f"{metrics.num_cpu_decodes / decodes:.0%}",
    ]


def _plot(reports: dict[str, Report], path: Path) -> None:
    """The distribution of per-token latency."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.6))
    for policy, report in reports.items():
        times = np.sort([1e3 * request.per_token_s for request in report.requests])
        axis.plot(times, np.arange(1, len(times) + 1) / len(times), label=policy)
    axis.set(xlabel="ms per token", ylabel="share of requests", xscale="log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
