"""The plots of scripts/figures.py, from its points. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SETTINGS = (("T4", "OSC"), ("A10G", "AC"), ("2xH100", "AC"))


def draw(rows: list[Row], out: Path, paper: dict[str, float]) -> None:
    """Writes one PNG per figure, and a second set for the further candidates."""
    import matplotlib as mpl

    mpl.use("Agg")
    sets = {
        "": ("gpu-only", "neo"),
        "_further": ("gpu-only, chunks", "neo, chunks", "+ merged", "+ piggyback"),
    }
    for suffix, variants in sets.items():
        if not any(row["variant"] == variants[-1] for row in rows):
            continue
        _loads(rows, out / f"fig6{suffix}.png", variants)
        _distribution(rows, out / f"fig7{suffix}.png", variants)
        _fastdecode(rows, out / f"fig8{suffix}.png", (*variants, "fastdecode-plus"))
        _sweeps(rows, out / f"fig9{suffix}.png", variants, paper)
        _sizes(rows, out / f"fig10a{suffix}.png", variants, paper)
    _two_gpus(rows, out / "fig10b.png")


def _axes(count: int) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(4.6 * count, 3.6), squeeze=False)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    wanted = {"cpu_bandwidth": 1.0, **wanted}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _line(axis: Any, rows: list[Row], x: str, y: Callable[[Row], float], label: str) -> None:
    ordered = sorted(rows, key=lambda row: row[x])
    if ordered:
        axis.plot([row[x] for row in ordered], [y(row) for row in ordered], "o-", label=label)


def _ratio(rows: list[Row], base: str) -> Callable[[Row], float]:
    """Throughput over the same point's of ``base``."""
    keys = ("machine", "num_prompt", "num_output", "requests")

    def ratio(row: Row) -> float:
        (other,) = _of(rows, variant=base, rate=None, trace=None, **{k: row[k] for k in keys})
        return float(row["requests_per_s"] / other["requests_per_s"])

    return ratio


def _loads(rows: list[Row], path: Path, variants: tuple[str, ...]) -> None:
    figure, axes = _axes(3)
    for axis, (machine, trace) in zip(axes, SETTINGS, strict=True):
        for variant in variants:
            points = _of(rows, machine=machine, trace=trace, variant=variant)
            _line(axis, points, "rate", lambda row: 1e3 * row["per_token_s"], variant)
        axis.set(title=f"{machine}, {trace}", xlabel="requests/s", ylabel="ms per token, mean")
        axis.set_yscale("log")
    _save(figure, path)


def _distribution(rows: list[Row], path: Path, variants: tuple[str, ...]) -> None:
    figure, (axis,) = _axes(1)
    for variant in variants:
        for row in _of(rows, machine="A10G", trace="AC", rate=1.6, variant=variant):
            shares = [share / 100 for share in range(0, 101, 5)]
            axis.plot([1e3 * s for s in row["per_token_percentiles_s"]], shares, label=variant)
    axis.set(title="A10G, AC, 1.6 requests/s", xlabel="ms per token", ylabel="share of requests")
    axis.set_xscale("log")
    _save(figure, path)


def _fastdecode(rows: list[Row], path: Path, variants: tuple[str, ...]) -> None:
    figure, (left, right) = _axes(2)
    for variant in variants:
        points = _of(rows, machine="2xH100", trace="AC", variant=variant)
        _line(left, points, "rate", lambda row: 1e3 * row["per_token_s"], variant)
        sweep = _of(rows, machine="2xH100", trace=None, rate=None, num_prompt=2000, variant=variant)
        _line(right, sweep, "num_output", _ratio(rows, variants[0]), variant)
    left.set(title="2xH100, AC", xlabel="requests/s", ylabel="ms per token, mean", yscale="log")
    right.set(title="2xH100, input 2000", xlabel="output", ylabel=f"over {variants[0]}")
    _save(figure, path)


def _sweeps(
    rows: list[Row], path: Path, variants: tuple[str, ...], paper: dict[str, float]
) -> None:
    figure, axes = _axes(3)
    for axis, (machine, _) in zip(axes, SETTINGS, strict=True):
        sweep = _of(rows, machine=machine, trace=None, rate=None)
        for prompt in sorted({row["num_prompt"] for row in sweep}):
            for variant in variants[1:]:
                points = [r for r in sweep if (r["num_prompt"], r["variant"]) == (prompt, variant)]
                label = f"{variant}, input {prompt}"
                _line(axis, points, "num_output", _ratio(rows, variants[0]), label)
        axis.axhline(paper[machine], linestyle="--", color="grey", label="paper's peak")
        axis.set(title=machine, xlabel="output", ylabel=f"throughput over {variants[0]}")
    _save(figure, path)


def _sizes(rows: list[Row], path: Path, variants: tuple[str, ...], paper: dict[str, float]) -> None:
    figure, axes = _axes(len(variants) - 1)
    for axis, variant in zip(axes, variants[1:], strict=True):
        for number, size in enumerate(name for name in paper if name.startswith("g5.")):
            points = _of(rows, machine=size, variant=variant, rate=None)
            _line(axis, points, "num_output", _ratio(rows, variants[0]), size)
            axis.axhline(paper[size], linestyle="--", color=f"C{number}", alpha=0.5)
        title = f"{variant}, input 1000 (dashed: the paper's peaks)"
        axis.set(xlabel="output", ylabel=f"over {variants[0]}")
        axis.set_title(title, fontsize=9)
    _save(figure, path)


def _two_gpus(rows: list[Row], path: Path) -> None:
    figure, (axis,) = _axes(1)
    for machine, variant in (
        ("g5.16xlarge", "gpu-only"),
        ("g5.16xlarge", "neo"),
        ("2xA10G", "gpu-only"),
        ("2xA10G", "neo"),
    ):
        points = _of(rows, machine=machine, variant=variant, rate=None, requests=250)
        _line(axis, points, "num_output", lambda r: r["requests_per_s"], f"{machine}, {variant}")
    axis.set(title="input 1000", xlabel="output", ylabel="requests/s")
    _save(figure, path)
