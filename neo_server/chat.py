"""``neo chat``: a conversation on a terminal, or of the lines of a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress

from rich.console import Console

from neo_server.client import Client
from neo_server.errors import InvalidRequestError, NeoError
from neo_server.outputs import Finished
from neo_server.params import Message, SamplingParams

_HELP = "/clear forgets the conversation, /system TEXT begins one with TEXT, /exit ends."
_PROMPT = "> "


class Chat:
    """Turns so far, and the server that answers."""

    def __init__(
        self, client: Client, params: SamplingParams, console: Console, system: str | None = None
    ) -> None:
        self._client = client
        self._params = params
        self._console = console
        self.messages: list[Message] = []
        self._system = system
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system's message."""
        self.messages = [] if self._system is None else [_message("system", self._system)]

    def run(self, lines: Iterator[str]) -> None:
        """Until there are no more lines, or one is ``/exit``. Raises ``NeoError``.

        A turn that the server refuses (the conversation became too long, for instance) is said
        and forgotten.
        """
        for line in lines:
            command, _, rest = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                return
            if command == "/clear":
                self.clear()
            elif command == "/system":
                self._system = rest or None
                self.clear()
            elif command.startswith("/"):
                self._say(_HELP)
            elif line.strip():
                self._turn(line.strip())

    def _turn(self, text: str) -> None:
        self.messages.append(_message("user", text))
        try:
            answer = self._answer()
        except InvalidRequestError as error:
            self.messages.pop()
            self._say(f"refused: {error}")
        else:
            self.messages.append(_message("assistant", answer))

    def _answer(self) -> str:
        """Prints it as it comes. An interrupt ends it, and what there is stays."""
        sent = first = time.perf_counter()
        parts: list[str] = []
        try:
            with closing(self._client.stream(list(self.messages), self._params)) as deltas:
                for delta in deltas:
                    if not parts and delta.token_ids:
                        first = time.perf_counter()
                    if delta.token_ids:
                        parts.append(delta.text)
                    self._console.out(delta.text, end="", highlight=False)
                    self._console.file.flush()
                    if delta.finished is not None:
                        last = time.perf_counter()
                        self._console.print()
                        self._say(summary(delta.finished, first - sent, last - first))
        except KeyboardInterrupt:
            self._console.print()
            self._say("interrupted")
        return "".join(parts)

    def _say(self, text: str) -> None:
        self._console.print(f"[{text}]", style="dim", markup=False, highlight=False)


def summary(finished: Finished, first_s: float, rest_s: float) -> str:
    """What an answer took: ``first_s`` to its first token, ``rest_s`` from there to its last."""
    tokens = finished.num_output_tokens
    rate = f"{(tokens - 1) / rest_s:.1f} tokens/s, " if tokens > 1 and rest_s > 0.0 else ""
    return (
        f"{tokens} tokens, {rate}first after {first_s:.2f} s, {finished.placement}, "
        f"{finished.reason}"
    )


def chat(client: Client, params: SamplingParams, system: str | None) -> None:
    """Reads lines from stdin. Raises ``NeoError``."""
    console = Console()
    info = client.model_info()
    if not info.has_chat_template:
        raise NeoError(f"{info.model} has no chat template; `neo generate` continues texts")
    terminal = sys.stdin.isatty()
    if terminal:
        greeting = f"{info.model}: {_HELP} Ctrl-C ends an answer."
        console.print(greeting, style="dim", markup=False, highlight=False)
    Chat(client, params, console, system).run(_typed_lines() if terminal else iter(sys.stdin))


def _typed_lines() -> Iterator[str]:
    """With editing and history, where there is readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it
    while True:
        try:
            yield input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
