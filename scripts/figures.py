"""Draws figures 6 to 10 of arXiv 2411.01142 from the simulator, and what further plans add.

    python scripts/figures.py --data-dir DIR --out build/figures

DIR holds the public traces AzureLLMInferenceTrace_code.csv ("AC") and osc-Llama-2-7b-hf.json
("OSC"). Every point is one simulation; points.json keeps all of them, gains.md compares the peaks
with the paper's. docs/simulation.md explains both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from neo_server.plan import Mode
from neo_server.roofline import SHAPES, RooflineCost, gpu_cache_tokens, load_hardware
from neo_server.simulator import figures_plot
from neo_server.simulator.run import ALL_MODES, PAPER_MODES, Setting, simulate
from neo_server.simulator.workload import arrivals, limited, read_trace, synthetic
from protos.config import SchedulerConfig

TRACES = {"AC": "AzureLLMInferenceTrace_code.csv", "OSC": "osc-Llama-2-7b-hf.json"}
OUTPUTS = (50, 100, 200, 300, 400)


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
    budget = 2048 if chunked else machine.max_model_len
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_seqs=512,
        max_num_batched_tokens=max(budget, 832),
        max_model_len=machine.max_model_len,
        enable_chunked_prefill=chunked,
    )
    if point.trace is None:
        lengths = synthetic(point.num_prompt, point.num_output, point.requests)
    else:
        trace = read_trace(Path(data_dir) / TRACES[point.trace])
        lengths = limited(trace, machine.max_model_len, point.requests)
    cpu_tokens = int(hardware.cpu_memory_gb * 1e9 / (shape.kv_bytes * shape.layers))
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


LOADS = {
    "T4": ("OSC", (0.2, 0.4, 0.6, 0.9, 1.3, 1.8)),
    "A10G": ("AC", (0.4, 0.7, 1.0, 1.3, 1.6)),
    "2xH100": ("AC", (1.0, 2.0, 3.0, 4.0, 5.0)),
}
SWEEPS = {  # figure 9: inputs and outputs
    "T4": ((200, 400), (25, 50, 100, 200, 300)),
    "A10G": ((500, 1000, 2000), OUTPUTS),
    "2xH100": ((500, 1000, 2000), OUTPUTS),
}
SIZES = ("g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge")
PAPER_SET = ("gpu-only", "neo", "fastdecode-plus", "symmetric")
FURTHER_SET = ("gpu-only, chunks", "neo, chunks", "+ merged", "+ piggyback")


def load_points(variants: Sequence[str]) -> list[Point]:
    """Figures 6, 7 and 8a."""
    return [
        Point(machine, variant, trace=trace, rate=rate)
        for machine, (trace, rates) in LOADS.items()
        for rate in rates
        for variant in variants
    ]


def sweep_points(variants: Sequence[str]) -> list[Point]:
    """Figures 8b and 9."""
    return [
        Point(machine, variant, num_prompt=prompt, num_output=output)
        for machine, (prompts, outputs) in SWEEPS.items()
        for prompt in prompts
        for output in outputs
        if prompt * 1.1 + output * 1.1 <= MACHINES[machine].max_model_len
        for variant in variants
    ]


def further_points(variants: Sequence[str]) -> list[Point]:
    """The second set: every other load of figures 6 to 8, one input length of figure 9."""
    loads = [p for p in load_points(variants) if p.rate in LOADS[p.machine][1][::2]]
    lengths = {"T4": 400, "A10G": 1000, "2xH100": 2000}
    return loads + [p for p in sweep_points(variants) if p.num_prompt == lengths[p.machine]]


def size_points(variants: Sequence[str]) -> list[Point]:
    """Figure 10a, and 10b's machines."""
    return [
        Point(size, variant, num_prompt=1000, num_output=output, requests=250)
        for size in SIZES
        for output in OUTPUTS
        for variant in variants
    ]


def two_gpu_points() -> list[Point]:
    """Figure 10b."""
    return [
        Point(machine, variant, num_prompt=1000, num_output=output, requests=250)
        for output in OUTPUTS
        for machine, variant in (
            ("g5.16xlarge", "gpu-only"),
            ("g5.16xlarge", "neo"),
            ("2xA10G", "gpu-only"),
            ("2xA10G", "neo"),
        )
    ]


PAPER_GAINS = {  # section 6: peak gains over GPU-only
    "T4": 7.5,
    "A10G": 1.26,
    "2xH100": 1.14,
    "g5.2xlarge": 1.122,
    "g5.4xlarge": 1.133,
    "g5.8xlarge": 1.297,
    "g5.16xlarge": 1.793,
}


def peak(points: Points, machine: str, variant: str, base: str) -> tuple[float, Point]:
    """The largest gain over a machine's throughput points."""
    found = [
        (points.gain(point, base), point)
        for point in points.results
        if point.machine == machine
        and point.variant == variant
        and point.rate is None
        and point.trace is None
        and point.cpu_bandwidth == 1.0
    ]
    return max(found, key=lambda pair: pair[0])


def sensitivity(points: Points) -> dict[str, list[float]]:
    """Each peak again with 20 % less and more CPU bandwidth."""
    peaks = {name: peak(points, name, "neo", "gpu-only")[1] for name in PAPER_GAINS}
    points.run(replace(point, cpu_bandwidth=f) for point in peaks.values() for f in (0.8, 1.2))
    return {
        name: [points.gain(replace(point, cpu_bandwidth=f), "gpu-only") for f in (0.8, 1.2)]
        for name, point in peaks.items()
    }


def gains_table(points: Points, spread: dict[str, list[float]]) -> str:
    """The comparison with the paper, as Markdown."""
    lines = [
        "| machine | paper | simulated | at input/output | CPU -20 % | CPU +20 % |"
        " chunks: neo | + merged | + piggyback |",
        "| --- " * 9 + "|",
    ]
    for name, paper in PAPER_GAINS.items():
        gain, at = peak(points, name, "neo", "gpu-only")
        has_more = any(point.variant == FURTHER_SET[-1] for point in points.results)
        more = [
            peak(points, name, v, "gpu-only, chunks")[0] if has_more else float("nan")
            for v in FURTHER_SET[1:]
        ]
        cells = [f"{value:.3f}" for value in (*spread[name], *more)]
        lines.append(
            f"| {name} | {paper:.3f} | {gain:.3f} | {at.num_prompt}/{at.num_output} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join([*lines, "", *_floors(points)]) + "\n"


def _floors(points: Points) -> list[str]:
    """The smallest ratios, over all throughput points."""
    lines = []
    for variant, base in (
        ("neo", "gpu-only"),
        ("neo", "fastdecode-plus"),
        ("neo", "symmetric"),
        ("fastdecode-plus", "gpu-only"),
        ("neo, chunks", "gpu-only, chunks"),
        ("+ merged", "gpu-only, chunks"),
        ("+ piggyback", "gpu-only, chunks"),
    ):
        ratios = [
            (points.gain(point, base), point)
            for point in points.results
            if point.variant == variant
            and point.cpu_bandwidth == 1.0
            and replace(point, variant=base) in points.results
        ]
        if ratios:
            low, at = min(ratios, key=lambda pair: pair[0])
            where = f"{at.machine} {at.trace or f'{at.num_prompt}/{at.num_output}'}"
            if at.rate is not None:
                where += f" at {at.rate} req/s"
            lines.append(f"Least {variant} / {base}: {low:.3f} ({where}), {len(ratios)} points.")
    return lines


def main() -> None:
    """Runs all points, then writes data, tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/figures"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-further", action="store_true", help="only the paper's figures")
    arguments = parser.parse_args()
    begin = time.monotonic()
    points = Points(arguments.data_dir, arguments.jobs)
    points.run([*load_points(PAPER_SET[:3]), *sweep_points(PAPER_SET), *two_gpu_points()])
    points.run(size_points(PAPER_SET[:2]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    spread = sensitivity(points)
    points.save(arguments.out)
    further = () if arguments.no_further else FURTHER_SET
    points.run([*further_points(further), *size_points(further)])
    rows = points.save(arguments.out)
    table = gains_table(points, spread)
    (arguments.out / "gains.md").write_text(table)
    print(table)
    figures_plot.draw(rows, arguments.out, PAPER_GAINS)
    print(f"{len(rows)} points in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
