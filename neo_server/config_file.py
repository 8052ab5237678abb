"""``--config FILE``: defaults of a command's flags, from YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Option

from neo_server.names import unknown


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Runs before the other flags are looked at, which a file's value then is a default of."""
    if path is not None:
        names = [param.name for param in context.command.params if param.name is not None]
        known = [name for name in names if name not in ("config", "help")]
        context.default_map = {**(context.default_map or {}), **read(path, known)}
    return path


@dataclass(frozen=True, slots=True)
class ConfigFlags:
    """The flag itself."""

    config: Annotated[
        Path | None,
        Option(
            help="YAML file of flags, by their names without '--'. Flags and environment "
            "variables win over it.",
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=_load,
        ),
    ] = None


def read(path: Path, known: list[str]) -> dict[str, Any]:
    """Values by parameter name; ``-`` and ``_`` are the same. Raises ``typer.BadParameter``."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path}: it must be a mapping of flags to values")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise typer.BadParameter(f"{path}: {unknown('flag', str(key), known)}")
        if name in values:
            raise typer.BadParameter(f"{path}: {key} is there twice, as {name}")
        values[name] = _plain(path, key, value)
    return {name: value for name, value in values.items() if value is not None}


def _plain(path: Path, key: object, value: Any) -> Any:
    """As the command line would have it, so that it is checked alike; null is unset."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return str(value)
    raise typer.BadParameter(f"{path}: {key} is {value!r:.100}; it must be one value")
