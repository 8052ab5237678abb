"""Dataclasses as command lines: each flag is declared once, for every command that takes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_type_hints


def takes(
    *kinds: type[Any],
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    panels: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of dataclasses as parameters; it gets one object of each.

    ``without``: fields that stay at their default and are no flag. ``defaults``: other defaults for
    this command. ``panels``: fields by the panel of the help that shows them; their flags are
    ``Annotated``. Typer reads the signature.
    """
    given = dict(defaults or {})
    panel_of = {name: panel for panel, names in (panels or {}).items() for name in names}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**flags: Any) -> None:
            values = given | flags
            command(*(_build(kind, values) for kind in kinds))

        parameters, hints = [], {}
        for kind in kinds:
            found = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                if field.name in without:
                    continue
                hint = hints[field.name] = _shown_in(panel_of.get(field.name), found[field.name])
                default = given.get(field.name, field.default)
                parameters.append(
                    inspect.Parameter(
                        field.name,
                        inspect.Parameter.POSITIONAL_OR_KEYWORD,
                        annotation=hint,
                        default=inspect.Parameter.empty if default is MISSING else default,
                    )
                )
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = hints
        return wrapper

    return decorate


def _shown_in(panel: str | None, hint: Any) -> Any:
    if panel is None:
        return hint
    kind, *extras = get_args(hint)
    shown = [copy(one) for one in extras]
    for one in shown:
        one.rich_help_panel = panel
    return Annotated[(kind, *shown)]


def _build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
