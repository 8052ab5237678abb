"""Draws a part of a timeline of ``neo bench throughput --trace-timeline``. Needs matplotlib.

python scripts/timeline_figure.py timeline.json timeline.svg --layers 10 14

One iteration, by itself one with two sub-batches, else the one with the most attention tasks: the
gpu worker's stages, a row for each sub-batch and for riders, and the tasks of every CPU thread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLOURS = {
    "linear": "#4878a8", "handoff": "#c9b458", "collect": "#8f7fb3", "gpu_attn": "#7aa874",
    "cpu_wait": "#d9d9d9", "swap": "#a87a9f", "head": "#8c8c8c", "attend": "#d08770",
}  # fmt: skip
SHADES = {0: 1.0, 1: 0.55}  # opacity by sub-batch
BESIDE = ("copies out", "copies in", "riders")  # tracks of the device beside its stages
NAMES = {
    "handoff": "stores, hand-off", "collect": "collect O", "gpu_attn": "attention here",
    "cpu_wait": "wait for O", "attend": "attention task",
}  # fmt: skip

Event = dict[str, Any]


def choose(spans: list[Event]) -> Event:
    """The iteration with the most sub-batches, then the most tasks."""
    channels: dict[int, set[int]] = {}
    for span in spans:
        if span["name"] == "linear":
            channels.setdefault(span["args"]["plan_id"], set()).add(span["args"]["channel"])
    whole = [span for span in spans if span["name"] == "iteration"]
    return max(
        whole,
        key=lambda span: (len(channels.get(span["args"]["plan_id"], ())), span["args"]["tasks"]),
    )


def rows_of(trace: dict[str, Any], low: int, high: int, plan: int | None) -> dict[str, list[Event]]:
    """By row of the drawing: spans while the gpu worker is in layers [low, high) of a plan."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    if plan is None:
        plan = choose(spans)["args"]["plan_id"]
    mine = [s for s in spans if s["args"].get("plan_id") == plan and "layer" in s["args"]]
    mine = [s for s in mine if low <= s["args"]["layer"] < high]
    begin = min(span["ts"] for span in mine)
    end = max(span["ts"] + span["dur"] for span in mine)
    beside = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["args"]["name"] in BESIDE
    }
    rows: dict[str, list[Event]] = {}
    for span in mine:
        if span["name"] != "swap" or span["dur"] > (end - begin) / 1000:
            row = f"gpu worker\nbatch-{span['args'].get('channel', 0)}"
            rows.setdefault(beside.get((span["pid"], span["tid"]), row), []).append(span)
    threads = {
        (event["pid"], event["tid"]): i
        for i, event in enumerate(
            event
            for event in trace["traceEvents"]
            if event["name"] == "process_name" and event["args"]["name"].startswith("cpu")
        )
    }
    for span in spans:
        if span["name"] == "attend" and span["ts"] < end and span["ts"] + span["dur"] > begin:
            thread = threads[span["pid"], span["tid"]]
            rows.setdefault(f"CPU thread {thread:2d}", []).append(span)
    return {row: [s | {"ts": s["ts"] - begin} for s in rows[row]] for row in sorted(rows)[::-1]}


def draw(rows: dict[str, list[Event]], out: Path) -> None:
    """The picture; its type is that of the name."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(10, 0.55 * len(rows) + 1.5))
    used: dict[str, str] = {}
    for at, spans in enumerate(rows.values()):
        for span in spans:
            name = str(span["name"])
            colour = used.setdefault(NAMES.get(name, name), COLOURS[name])
            axes.broken_barh(
                [(span["ts"] * 1e-3, span["dur"] * 1e-3)],
                (at - 0.38, 0.76),
                color=colour,
                alpha=SHADES.get(span["args"].get("channel", 0), 1.0),
                linewidth=0,
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("ms")
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in used.items()],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(used), frameon=False,
    )  # fmt: skip
    figure.savefig(out, bbox_inches="tight", dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs=2, default=(10, 14), metavar=("FROM", "TO"))
    parser.add_argument("--plan", type=int, help="its plan_id; default: as said above")
    args = parser.parse_args()
    low, high = args.layers
    draw(rows_of(json.loads(args.timeline.read_text()), low, high, args.plan), args.out)


if __name__ == "__main__":
    main()
