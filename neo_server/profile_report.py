"""The command ``neo profile``: starts the workers once, and shows what they measured."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from neo_server.errors import NeoError
from neo_server.launch import Options, Resolved
from neo_server.server import Server
from neo_server.table_cost import Curve, ProfileTable, Surface

_TIMEOUT_S = 300.0  # loading the model and profiling
CURVES = (
    "linear",
    "prefill_attn",
    "handoff",
    "ride_handoff",
    "staging",
    "storing",
    "transfer",
    "head",
)
SURFACES = ("gpu_attn", "cpu_attn")


async def measure(options: Options, resolved: Resolved) -> ProfileTable:
    """The table of this machine and model; stored ones are used. Raises ``NeoError``."""
    async with asyncio.timeout(_TIMEOUT_S):
        table = await Server(options, resolved).profile()
    if table is None:
        raise NeoError("the gpu worker did not profile")
    return table


def print_table(console: Console, table: ProfileTable) -> None:
    """Milliseconds per layer, with bars that are relative to the largest of a stage."""
    console.print(f"{table.num_points} points; {table.key.gpu}, {table.key.cpu}")
    for name in CURVES:
        curve: Curve | None = getattr(table, name)
        if curve is None:
            continue
        rows = [(f"{x:g}", seconds) for x, seconds in zip(curve.x, curve.seconds, strict=True)]
        _print(console, name, rows)
    for name in SURFACES:
        surface: Surface | None = getattr(table, name)
        if surface is not None:
            _print(
                console,
                name,
                [
                    (f"{rows:g} x {length:g}", seconds)
                    for rows, line in zip(surface.rows, surface.seconds, strict=True)
                    for length, seconds in zip(surface.tokens_per_row, line, strict=True)
                ],
            )


def _print(console: Console, name: str, rows: list[tuple[str, float]]) -> None:
    most = max(seconds for _, seconds in rows) or 1.0
    output = Table(name, "ms", "")
    for label, seconds in rows:
        output.add_row(label, f"{1e3 * seconds:.3f}", "#" * round(30 * seconds / most))
    console.print(output)


def plot(table: ProfileTable, path: Path) -> None:
    """One panel per stage. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7))
    panels = iter(axes.flat)
    for name in CURVES:
        axis, curve = next(panels), getattr(table, name)
        if curve is not None:
            axis.plot(curve.x, [1e3 * s for s in curve.seconds], "o-")
        axis.set(title=name, ylabel="ms", xscale="log", yscale="log")
    for name in SURFACES:
        axis, surface = next(panels), getattr(table, name)
        for rows, line in zip(surface.rows, surface.seconds, strict=True) if surface else ():
            axis.plot(surface.tokens_per_row, [1e3 * s for s in line], "o-", label=f"{rows:g} rows")
        axis.set(title=name, ylabel="ms", xlabel="tokens per row", xscale="log", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
