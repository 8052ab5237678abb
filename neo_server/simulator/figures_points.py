"""The simulations behind the paper's figures: machines, variants, single points and their cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from neo_server.plan import Mode
from neo_server.roofline import SHAPES, RooflineCost, gpu_cache_tokens, load_hardware
from neo_server.simulator.ideal import Packing, ideal_rate
from neo_server.simulator.run import ALL_MODES, PAPER_MODES, Setting, simulate
from neo_server.simulator.workload import arrivals, limited, read_trace, synthetic
from protos.config import SchedulerConfig

TRACES = {"AC": "AzureLLMInferenceTrace_code.csv", "OSC": "osc-Llama-2-7b-hf.json"}


@dataclass(frozen=True)
class Machine:
    """A setting of the paper."""

    hardware: str
    model: str
    gpu_tokens: int
    max_model_len: int


H100_TOKENS = gpu_cache_tokens(load_hardware("2xh100"), SHAPES["llama-3.1-70b"])
MACHINES = {
    # 864 tokens and max_model_len 832 are the authors' artefact's; 26,400 is the paper's.
    "T4": Machine("g4dn.4xlarge", "llama-2-7b", 864, 832),
    "A10G": Machine("g5.4xlarge", "llama-3.1-8b", 26_400, 8192),
    "2xH100": Machine("2xh100", "llama-3.1-70b", H100_TOKENS, 8192),
    "2xA10G": Machine(
        "2xa10g",
        "llama-3.1-8b",
        gpu_cache_tokens(load_hardware("2xa10g"), SHAPES["llama-3.1-8b"]),
        8192,
    ),
    **{
        name: Machine(name, "llama-3.1-8b", 26_400, 8192)
        for name in ("g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge")
    },
}
VARIANTS = {  # name: policy, kinds of plan, chunked prefill
    "gpu-only": ("gpu-only", PAPER_MODES, False),
    "symmetric": ("symmetric", PAPER_MODES, False),
    "fastdecode-plus": ("fastdecode-plus", PAPER_MODES, False),
    "neo": ("neo", PAPER_MODES, False),
    "gpu-only, chunks": ("gpu-only", PAPER_MODES, True),
    "neo, chunks": ("neo", PAPER_MODES, True),
    "+ merged": ("neo", ALL_MODES - {Mode.PIGGYBACK}, True),
    "+ piggyback": ("neo", ALL_MODES, True),
}


MAX_NUM_SEQS = 512
CHUNKED_BUDGET = 2048  # tokens of an iteration


@dataclass(frozen=True)
class Point:
    """One simulation."""

    machine: str
    variant: str
    trace: str | None = None  # else synthetic lengths
    num_prompt: int = 0
    num_output: int = 0
    rate: float | None = None  # requests per second; None: all at once
    requests: int = 150
    cpu_bandwidth: float = 1.0


def run_point(task: tuple[Point, str]) -> tuple[Point, dict[str, Any]]:
    """Simulates a point."""
    point, data_dir = task
    machine = MACHINES[point.machine]
    policy, modes, chunked = VARIANTS[point.variant]
    hardware, shape = load_hardware(machine.hardware), SHAPES[machine.model]
    cost = RooflineCost(hardware, shape).with_cpu_bandwidth(point.cpu_bandwidth)
    budget = CHUNKED_BUDGET if chunked else machine.max_model_len
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max(budget, 832),
        max_model_len=machine.max_model_len,
        enable_chunked_prefill=chunked,
    )
    if point.trace is None:
        lengths = synthetic(point.num_prompt, point.num_output, point.requests)
    else:
        trace = read_trace(Path(data_dir) / TRACES[point.trace])
        lengths = limited(trace, machine.max_model_len, point.requests)
    cpu_tokens = shape.tokens_in(hardware.cpu_memory_gb * 1e9)
    setting = Setting(policy, cost, machine.gpu_tokens, cpu_tokens, config, modes)
    report = simulate(setting, arrivals(lengths, point.rate))
    return point, {
        "requests_per_s": report.requests_per_s,
        "per_token_s": report.mean_per_token_s,
        "per_token_percentiles_s": [report.percentile("per_token_s", p) for p in range(0, 101, 5)],
        "ttft_p50_s": report.percentile("ttft_s", 50),
        "ttft_p99_s": report.percentile("ttft_s", 99),
        "tpot_p50_s": report.percentile("tpot_s", 50),
        "tpot_p99_s": report.percentile("tpot_s", 99),
        "gpu_busy": report.gpu_busy_s / report.seconds,
        "cpu_busy": report.cpu_busy_s / report.seconds,
        "iterations": {str(k): v for k, v in report.metrics.iterations.items()},
        "cpu_decodes": report.metrics.num_cpu_decodes,
    }


class Points:
    """All simulations, each run once."""

    def __init__(self, data_dir: Path, jobs: int) -> None:
        self.results: dict[Point, dict[str, Any]] = {}
        self._data_dir = str(data_dir)
        self._jobs = jobs

    def run(self, points: Iterable[Point]) -> None:
        """Runs those that are new."""
        new = [point for point in dict.fromkeys(points) if point not in self.results]
        with ProcessPoolExecutor(self._jobs) as pool:
            tasks = [(point, self._data_dir) for point in new]
            for done, (point, result) in enumerate(pool.map(run_point, tasks), 1):
                self.results[point] = result
                if done % 20 == 0 or done == len(new):
                    print(f"{done} of {len(new)} points", flush=True)

    def save(self, out: Path) -> list[dict[str, Any]]:
        """Writes points.json, and returns its rows."""
        rows = [{**asdict(point), **result} for point, result in self.results.items()]
        (out / "points.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return rows

    def gain(self, point: Point, base: str) -> float:
        """Throughput over that of another variant (without a CPU, so at any bandwidth)."""
        other = replace(point, variant=base, cpu_bandwidth=1.0)
        return float(self.results[point]["requests_per_s"] / self.results[other]["requests_per_s"])


def ideal(point: Point) -> float:
    """Requests per second of perfect packing of a point with synthetic lengths."""
    machine = MACHINES[point.machine]
    policy, modes, chunked = VARIANTS[point.variant]
    hardware, shape = load_hardware(machine.hardware), SHAPES[machine.model]
    prompt = float(point.num_prompt)
    if chunked:
        prefills = [CHUNKED_BUDGET / 2 ** (k / 2) for k in range(13)]
    else:
        prefills = [prompt * k for k in (1, 2, 4, 8) if prompt * k <= machine.max_model_len]
    packing = Packing(
        point.num_prompt,
        point.num_output,
        machine.gpu_tokens,
        shape.tokens_in(hardware.cpu_memory_gb * 1e9),
        MAX_NUM_SEQS,
        (0.0, *prefills),
        frozenset((Mode.GPU_ONLY,)) if policy == "gpu-only" else modes,
    )
    cost = RooflineCost(hardware, shape).with_cpu_bandwidth(point.cpu_bandwidth)
    return ideal_rate(cost, packing)
