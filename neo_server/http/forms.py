"""The two shapes of an answer: completions and chat completions, whole and as chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from neo_server.request import Finish, Request


def usage_of(served: Sequence[Request]) -> dict[str, int]:
    """Tokens of all choices together."""
    prompt = sum(request.sequence.num_prompt for request in served)
    output = sum(request.sequence.num_output for request in served)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


@dataclass(slots=True)
class CompletionForm:
    """Of ``/v1/completions``."""

    model: str
    eos_token_ids: Collection[int]
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """The whole answer."""
        return {**self._head(self.whole), "choices": choices, "usage": usage}

    def part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return {**self._head(self.chunk), "choices": choices}

    def choice(self, index: int, text: str, finish: Finish) -> dict[str, Any]:
        """A whole choice."""
        return self.delta(index, text, finish)

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before a choice's first text."""
        return None

    def delta(self, index: int, text: str, finish: Finish | None) -> dict[str, Any]:
        """A part of a choice."""
        return {"index": index, "text": text, "logprobs": None, **self._end(finish)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _end(self, finish: Finish | None) -> dict[str, Any]:
        """``stop_reason`` is vLLM's: the stop string or token; ``null`` for the model's own."""
        if finish is None:
            return {"finish_reason": None}
        token = finish.stop_token_id
        reason = finish.stop_str if token is None or token in self.eos_token_ids else token
        return {"finish_reason": finish.reason.name.lower(), "stop_reason": reason}


class ChatForm(CompletionForm):
    """Of ``/v1/chat/completions``."""

    prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: Finish) -> dict[str, Any]:
        """See ``CompletionForm``."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, **self._end(finish)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """See ``CompletionForm``."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, **self._end(None)}

    def delta(self, index: int, text: str, finish: Finish | None) -> dict[str, Any]:
        """See ``CompletionForm``."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, **self._end(finish)}
