"""Where log lines go."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler


def log_to(console: Console) -> None:
    """For people on a terminal; one plain line an event in a file."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, markup=False)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=logging.INFO, format=line)
