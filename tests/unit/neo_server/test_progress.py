from __future__ import annotations

from io import StringIO

from rich.console import Console

from neo_server.progress import progress


def test_a_terminal_sees_how_many_are_over() -> None:
    out = StringIO()
    with progress(Console(file=out, force_terminal=True), "neo", 5) as advance:
        for _ in range(3):
            advance()
    assert "3/5" in out.getvalue()


def test_a_file_gets_nothing() -> None:
    out = StringIO()
    with progress(Console(file=out), "neo", 5) as advance:
        advance()
    assert out.getvalue() == ""
