"""Draws figures 6 to 10 of arXiv 2411.01142 from the simulator, and what further plans add.

    python scripts/figures.py --data-dir DIR --out build/figures

DIR holds the public traces AzureLLMInferenceTrace_code.csv ("AC") and osc-Llama-2-7b-hf.json
("OSC"). Every point is one simulation; points.json keeps all of them, gains.md compares the peaks
with the paper's. docs/simulation.md explains both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neo_server.simulator import figures_plot
from neo_server.simulator.figures_points import MACHINES, Point, Points, ideal

OUTPUTS = (50, 100, 200, 300, 400)

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
    return "\n".join([*lines, "", *ideal_table(points), "", *_floors(points)]) + "\n"


def ideal_table(points: Points) -> list[str]:
    """What perfect packing would give at each peak: whether the machine or the schedule limits."""
    lines = [
        "| machine | at input/output | simulated | ideal | of it gpu-only | ideal/ideal |"
        " chunks, all plans: ideal/ideal |",
        "| --- " * 7 + "|",
    ]
    for name in PAPER_GAINS:
        gain, at = peak(points, name, "neo", "gpu-only")
        base = points.results[replace(at, variant="gpu-only")]["requests_per_s"]
        rates = {v: ideal(replace(at, variant=v)) for v in (*PAPER_SET[:2], *FURTHER_SET)}
        cells = (
            *(gain, rates["neo"] / base, rates["gpu-only"] / base),
            rates["neo"] / rates["gpu-only"],
            rates[FURTHER_SET[-1]] / rates[FURTHER_SET[0]],
        )
        lines.append(
            f"| {name} | {at.num_prompt}/{at.num_output} | "
            + " | ".join(f"{value:.3f}" for value in cells)
            + " |"
        )
    return lines


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
