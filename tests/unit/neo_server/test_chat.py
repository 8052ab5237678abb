from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any, cast

import pytest
from rich.console import Console

from neo_server.chat import Chat, summary
from neo_server.client import Client
from neo_server.errors import InvalidRequestError, UnavailableError
from neo_server.outputs import Delta, Finished
from neo_server.params import SamplingParams

FINISHED = Finished("stop", None, 9, 3, 0, 2, 0)


class FakeClient:
    """Answers every conversation with the same deltas."""

    def __init__(self, fail: BaseException | None = None) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.fail = fail

    def stream(self, messages: Sequence[Any], params: SamplingParams) -> Iterator[Delta]:
        self.asked.append([(one["role"], one["content"]) for one in messages])
        yield Delta("Hel", (1,))
        if self.fail is not None:
            raise self.fail
        yield Delta("lo.", (2, 3))
        yield Delta(finished=FINISHED)


def talk(client: FakeClient, *lines: str, system: str | None = None) -> str:
    out = StringIO()
    chat = Chat(cast(Client, client), SamplingParams(), Console(file=out, width=200), system)
    chat.run(iter(lines))
    return out.getvalue()


def test_the_model_sees_the_whole_conversation() -> None:
    client = FakeClient()
    text = talk(client, "one\n", "\n", "two\n", system="Be kind.")
    first = [("system", "Be kind."), ("user", "one")]
    assert client.asked == [first, [*first, ("assistant", "Hello."), ("user", "two")]]
    assert text.count("Hello.\n[3 tokens, ") == 2
    assert text.count("CPU-request, stop]") == 2


def test_commands() -> None:
    client = FakeClient()
    text = talk(client, "a", "/clear", "b", "/system Be brief.", "c", "/what", "/exit", "d")
    assert client.asked == [
        [("user", "a")],
        [("user", "b")],
        [("system", "Be brief."), ("user", "c")],
    ]
    assert "/clear forgets" in text


def test_a_turn_that_is_refused_is_forgotten() -> None:
    client = FakeClient(InvalidRequestError("prompt has 900 tokens"))
    text = talk(client, "long", "short")
    assert text.count("[refused: prompt has 900 tokens]") == 2
    assert client.asked == [[("user", "long")], [("user", "short")]]


def test_an_interrupted_answer_stays() -> None:
    client = FakeClient(KeyboardInterrupt())
    text = talk(client, "a", "b")
    assert text.count("Hel\n[interrupted]") == 2
    assert client.asked[1] == [("user", "a"), ("assistant", "Hel"), ("user", "b")]


def test_a_server_that_goes_away_ends_it() -> None:
    with pytest.raises(UnavailableError):
        talk(FakeClient(UnavailableError("gone")), "a")


def test_a_summary_has_rate_and_placement() -> None:
    assert summary(FINISHED, 0.25, 0.5) == (
        "3 tokens, 4.0 tokens/s, first after 0.25 s, CPU-request, stop"
    )
    one = Finished("length", None, 9, 1, 0, 0, 0)
    assert summary(one, 0.5, 0.0) == "1 tokens, first after 0.50 s, GPU-request, length"
