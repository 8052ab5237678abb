"""The engine's options as keyword arguments of Python, checked like the command line's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from neo_server.errors import ConfigurationError
from neo_server.names import unknown
from neo_server.options import PUBLIC, Options

_NO_LIMIT = (1 << 31) - 1  # of requests that wait: nobody but this process sends any


def engine_options(model: str, given: Mapping[str, Any]) -> Options:
    """Raises ``ConfigurationError`` with the option's name."""
    known = [field.name for field in fields(Options) if field.name not in (*PUBLIC, "model")]
    for name in given:
        if name not in known:
            raise ConfigurationError(unknown("option", name, known))
    values: dict[str, Any] = {"port": 0, "control_port": 0, "max_num_queued_reqs": _NO_LIMIT}
    values |= given
    if values.get("kv_offloading_size") == "auto":
        values["kv_offloading_size"] = None
    try:
        return TypeAdapter(Options).validate_python({"model": str(model), **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{where} is {first['input']!r}: {first['msg']}") from error
