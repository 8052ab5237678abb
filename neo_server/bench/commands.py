"""The commands ``neo bench ...``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import typer
from rich.console import Console

from neo_native import NativeError
from neo_server.bench.throughput import ThroughputFlags
from neo_server.errors import NeoError
from neo_server.flags import takes
from neo_server.launch import Options
from neo_server.log import log_to

app = typer.Typer(
    help="Measures the engine with its worker processes; JSON lines on stdout.",
    no_args_is_help=True,
)
# What is for clients of a server.
_PUBLIC = ("host", "port", "address_file", "served_model_name", "max_waiting", "shutdown_timeout")
_DEFAULTS = {"control_port": 0}  # beside a server that runs


@app.command()
@takes(Options, ThroughputFlags, without=_PUBLIC, defaults=_DEFAULTS)
def throughput(options: Options, flags: ThroughputFlags) -> None:
    """All requests at once: requests and tokens per second, one line for each policy."""
    from neo_server.bench.throughput import run

    _run(lambda console: run(options, flags, console))


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
