"""The two shapes of an answer: completions and chat completions, whole and as chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from neo_server.http.logprobs import Spelling, of_chat, of_completion, of_prompt
from neo_server.request import Finish, Output, Request


def usage_of(served: Sequence[Request]) -> dict[str, int]:
    """Tokens of all choices together; a prompt with several completions counts once."""
    prompt = sum(request.sequence.num_prompt for request in served if request.index == 0)
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
    spelling: Spelling
    logprobs: bool = False  # wanted, as below
    echo: bool = False
    prompt_logprobs: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def answer(self, outputs: Sequence[Output], usage: dict[str, int]) -> dict[str, Any]:
        """The whole answer; ``outputs``: each choice's."""
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return {**self._head(self.whole), "choices": choices, "usage": usage}

    def part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return {**self._head(self.chunk), "choices": choices}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        more = {}
        if self.prompt_logprobs:
            more["prompt_logprobs"] = of_prompt(output.prompt_logprobs, self.spelling)
        return {**self.delta(index, output), **more}

    def shows(self, output: Output) -> bool:
        """It makes a chunk of its own."""
        told = self.logprobs and output.logprobs
        return bool(output.text or output.finish is not None or told)

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before a choice's first text."""
        return None

    def delta(self, index: int, output: Output) -> dict[str, Any]:
        """A part of a choice."""
        entries = output.prompt_logprobs * self.echo + output.logprobs
        told = of_completion(entries, self.spelling) if self.logprobs and entries else None
        return {"index": index, "text": output.text, "logprobs": told, **self._end(output.finish)}

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

    def answer(self, outputs: Sequence[Output], usage: dict[str, int]) -> dict[str, Any]:
        """See ``CompletionForm``; prompt_logprobs are the answer's, as vLLM's."""
        answer = super().answer(outputs, usage)
        if self.prompt_logprobs:
            answer["prompt_logprobs"] = of_prompt(outputs[0].prompt_logprobs, self.spelling)
        return answer

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """See ``CompletionForm``."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        end = self._end(output.finish)
        return {"index": index, "message": message, "logprobs": self._told(output), **end}

    def opening(self, index: int) -> dict[str, Any] | None:
        """See ``CompletionForm``."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, **self._end(None)}

    def delta(self, index: int, output: Output) -> dict[str, Any]:
        """See ``CompletionForm``."""
        delta = {"content": output.text} if output.text else {}
        end = self._end(output.finish)
        return {"index": index, "delta": delta, "logprobs": self._told(output), **end}

    def _told(self, output: Output) -> dict[str, Any] | None:
        return of_chat(output.logprobs, self.spelling) if self.logprobs else None
