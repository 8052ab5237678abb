"""Where log lines go."""

from __future__ import annotations

import logging
import os

from rich.console import Console
from rich.logging import RichHandler

from neo_native.logs import FORMAT_VARIABLE, JsonFormatter

_PROCESS = "neo_server"


def log_to(console: Console, log_format: str = "text") -> None:
    """``text``: for people on a terminal, one plain line an event in a file. ``json``: objects.

    Workers that this process starts log alike.
    """
    os.environ[FORMAT_VARIABLE] = log_format
    handler: logging.Handler
    if log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter(_PROCESS))
    elif console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
