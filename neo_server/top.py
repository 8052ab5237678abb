"""``neo top``: what a running server does, every second."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from neo_server.client import Client
from neo_server.errors import NeoError
from protos import inference_pb2 as pb

_KINDS = {pb.WorkerInfo.KIND_GPU: "gpu", pb.WorkerInfo.KIND_CPU_ATTN: "cpu-attn"}
_BAR = 30  # columns


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server."""

    at_s: float
    loads: pb.GetLoadsResponse
    info: pb.GetServerInfoResponse


def take(client: Client) -> Sample:
    """Raises ``NeoError``."""
    return Sample(time.monotonic(), client.loads(), client.server_info())


def top(client: Client, interval_s: float, *, once: bool) -> None:
    """Until interrupted, or one view after one interval. Raises ``NeoError`` at the first look."""
    console = Console()
    model = client.model_info().model
    before = take(client)
    if once:
        time.sleep(interval_s)
        console.print(view(model, before, take(client)))
        return
    with Live(Text("..."), console=console, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval_s)
            try:
                after = take(client)
            except NeoError as error:
                live.update(Text(f"no answer: {error}", style="red"))
                continue
            live.update(view(model, before, after))
            before = after


def view(model: str, before: Sample, after: Sample) -> RenderableType:
    """Rates are over the time between the two."""
    info = after.info
    title = f"NEO {info.version}  {model}  {info.scheduling_policy} on {info.device}"
    headline = Text(f"{title}  up {info.uptime_s:.0f} s", style="bold")
    return Group(headline, _state(before, after), _workers(before, after))


def _state(before: Sample, after: Sample) -> Table:
    loads, old = after.loads, before.loads

    def rate(name: str) -> float:
        return _rate(getattr(old, name), getattr(loads, name), after.at_s - before.at_s)

    gpu, cpu = rate("num_gpu_decodes"), rate("num_cpu_decodes")
    share = f", {cpu / (gpu + cpu):.0%} on the CPU" if gpu + cpu else ""
    ran = {
        name: _rate(old.iterations.get(name, 0), count, after.at_s - before.at_s)
        for name, count in sorted(loads.iterations.items())
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        (
            "requests",
            f"{loads.num_running_reqs} running ({loads.num_cpu_reqs} CPU-requests), "
            f"{loads.num_waiting_reqs} waiting",
        ),
        ("tokens/s", f"{rate('num_output_tokens'):.1f}"),
        ("decode steps/s", f"{gpu:.1f} GPU, {cpu:.1f} CPU{share}"),
        ("GPU-cache", _bar(loads.num_used_gpu_blocks, loads.num_total_gpu_blocks, "blocks")),
        ("CPU-cache", _bar(loads.num_used_cpu_pages, loads.num_total_cpu_pages, "pages")),
        ("iterations/s", ", ".join(f"{x:.1f} {name}" for name, x in ran.items() if x) or "0"),
        (
            "since start",
            f"{loads.num_preemptions} preemptions, {loads.num_swap_outs} swap-outs, "
            f"{loads.num_swap_ins} swap-ins",
        ),
    ):
        table.add_row(name, value)
    return table


def _workers(before: Sample, after: Sample) -> Table:
    """Busy: of the gpu worker, its time in plans; of the others, their threads' time in kernels."""
    seconds = after.at_s - before.at_s
    old = {(worker.kind, worker.row, worker.pid): worker for worker in before.info.workers}
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "row", "pid", "threads", "busy", "KV read"):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for worker in after.info.workers:
        start = old.get((worker.kind, worker.row, worker.pid), pb.WorkerInfo())
        threads = max(worker.num_threads, 1)
        busy = _rate(start.busy_s, worker.busy_s, seconds) / threads
        gb = _rate(start.kv_bytes_read, worker.kv_bytes_read, seconds) / 1e9
        is_cpu = worker.kind == pb.WorkerInfo.KIND_CPU_ATTN
        table.add_row(
            *(_KINDS.get(worker.kind, "?"), str(worker.row), str(worker.pid)),
            str(worker.num_threads) if is_cpu else "",
            f"{busy:.0%}",
            f"{gb:.2f} GB/s" if is_cpu else "",
        )
    return table


def _rate(before: float, after: float, seconds: float) -> float:
    """Counters only grow; one that is less began anew."""
    return (after - before if after >= before else after) / max(seconds, 1e-9)


def _bar(used: int, total: int, unit: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(total, 1), completed=used, width=_BAR)
    row.add_row(bar, f"{used / max(total, 1):.0%}  {used} of {total} {unit}")
    return row
