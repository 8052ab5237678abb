"""Log lines of every process: for people, or one JSON object a line (``NEO_LOG_FORMAT=json``)."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

FORMAT_VARIABLE = "NEO_LOG_FORMAT"  # set by the server for the workers that it starts
FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "process", "pid", "logger", "message"}`` and what ``fields`` adds.

    A record gets fields by ``extra={"fields": {...}}``; their names do not replace those above.
    """

    def __init__(self, process: str) -> None:
        """``process``: what kind it is, as ``gpu_worker[0]``."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(getattr(record, "fields", {}) | line, ensure_ascii=False, default=str)


def log_format() -> str:
    """``text`` or ``json``. Raises ValueError for anything else in the environment."""
    name = os.environ.get(FORMAT_VARIABLE) or "text"
    if name not in FORMATS:
        raise ValueError(f"{FORMAT_VARIABLE} is {name!r}; it must be {' or '.join(FORMATS)}")
    return name


def configure(process: str) -> None:
    """Log lines of a worker, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process)
        if log_format() == "json"
        else logging.Formatter(f"%(asctime)s %(levelname)s {process}[%(process)d] %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
