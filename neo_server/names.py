"""Names that nobody knows."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """What to say of one: the nearest known names, or all."""
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"
