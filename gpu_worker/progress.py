"""Progress bars on a terminal; nothing anywhere else, and nothing where logs are JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from neo_native.logs import log_format


@contextmanager
def progress(
    what: str, total: int, console: Console | None = None
) -> Iterator[Callable[[], object]]:
    """Gives a call that advances a bar of ``total`` steps by one. ``console``: stderr's."""
    console = console or Console(stderr=True)
    if not console.is_terminal or log_format() == "json":
        yield lambda: None
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn()),
        *(MofNCompleteColumn(), TimeElapsedColumn()),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
