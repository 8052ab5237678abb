"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESH_S = 0.5  # drawing takes the event loop's time


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives a function to call when one of ``total`` is over."""
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False)
    drawn = time.monotonic()
    with bar:
        task = bar.add_task(title, total=total)

        def advance() -> None:
            nonlocal drawn
            bar.advance(task)
            if time.monotonic() - drawn > _REFRESH_S:
                drawn = time.monotonic()
                bar.refresh()

        yield advance
        bar.refresh()
