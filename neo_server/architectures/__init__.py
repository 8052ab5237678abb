"""Shapes of public models by name, for random weights; figures of their model cards."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
_OWNERS = ("meta-llama/",)
_ENDINGS = ("-hf", "-chat", "-instruct")


def known() -> list[str]:
    """Names that have a folder."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def find(name: str) -> Path | None:
    """The folder with the ``config.json`` of a model, however its name is usually spelled.

    ``meta-llama/Meta-Llama-3.1-8B-Instruct`` is ``Llama-3.1-8B``. None: it is no name of ours.
    """
    wanted = _normal(name)
    return next((_FOLDER / one for one in known() if one.lower() == wanted), None)


def _normal(name: str) -> str:
    short = name.lower()
    for owner in _OWNERS:
        short = short.removeprefix(owner)
    short = short.removeprefix("meta-")
    for ending in _ENDINGS:
        short = short.removesuffix(ending)
    return short
