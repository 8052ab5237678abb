from __future__ import annotations

import io

import pytest
from rich.console import Console

from gpu_worker.progress import progress


def drawn(is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with progress("loading weights", 3, console) as advance:
        for _ in range(3):
            advance()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEO_LOG_FORMAT", raising=False)
    assert "loading weights" in drawn(is_terminal=True)
    assert "3/3" in drawn(is_terminal=True)
    assert drawn(is_terminal=False) == ""


def test_no_bar_is_drawn_among_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_LOG_FORMAT", "json")
    assert drawn(is_terminal=True) == ""
