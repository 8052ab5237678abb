"""The commands ``neo bench ...``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from neo_native import NativeError
from neo_server.bench.latency import LatencyFlags
from neo_server.bench.latency import run as run_latency
from neo_server.bench.serve import ServeFlags
from neo_server.bench.serve import run as run_serve
from neo_server.bench.throughput import ThroughputFlags
from neo_server.bench.throughput import run as run_throughput
from neo_server.client_flags import ServerFlags
from neo_server.errors import NeoError
from neo_server.flags import takes
from neo_server.log import log_to
from neo_server.options import PANELS, PUBLIC, Options

app = typer.Typer(
    help="Measures the engine with its worker processes, or a server that runs.",
    no_args_is_help=True,
)
_DEFAULTS: dict[str, Any] = {"control_port": 0}  # beside a server that runs


@app.command()
@takes(Options, ThroughputFlags, without=PUBLIC, defaults=_DEFAULTS, panels=PANELS)
def throughput(options: Options, flags: ThroughputFlags) -> None:
    """All requests at once: requests and tokens per second, a line for each policy and work."""
    _run(lambda console: run_throughput(options, flags, console))


@app.command()
@takes(
    Options,
    LatencyFlags,
    without=PUBLIC,
    defaults=_DEFAULTS | {"scheduling_policy": "gpu-only"},
    panels=PANELS,
)
def latency(options: Options, flags: LatencyFlags) -> None:
    """One batch: seconds of a decode iteration and of the prefill, beside the device's roofline."""
    _run(lambda console: run_latency(options, flags, console))


@app.command()
@takes(ServeFlags, ServerFlags)
def serve(flags: ServeFlags, server: ServerFlags) -> None:
    """A server that runs, over gRPC or OpenAI's HTTP: latencies and throughput of its clients."""
    _run(lambda console: run_serve(flags, server, Console(), console))


def _run(work: Callable[[Console], None]) -> None:
    console = Console(stderr=True)
    log_to(console)
    try:
        work(console)
    except (NeoError, NativeError, ValueError, OSError) as error:
        typer.echo(f"neo: {error}", err=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
