"""Log-probabilities in the shapes of OpenAI's answers, and of vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from neo_server.sampling import TokenLogprobs

Spelling = Callable[[int], tuple[str, bytes]]  # of a token: its text, and the bytes it stands for


def of_completion(entries: Sequence[TokenLogprobs], spelling: Spelling) -> dict[str, Any]:
    """``logprobs`` of ``/v1/completions``; offsets count characters of the choice's text."""
    return {
        "tokens": [spelling(entry.token_id)[0] for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.logprob is None else _likeliest(entry, spelling) for entry in entries
        ],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _likeliest(entry: TokenLogprobs, spelling: Spelling) -> dict[str, float | None]:
    """The drawn token beside them, as vLLM does; of tokens with the same text the likelier."""
    found: dict[str, float | None] = {}
    for token, logprob in entry.top:
        found.setdefault(spelling(token)[0], logprob)
    found.setdefault(spelling(entry.token_id)[0], entry.logprob)
    return found


def of_chat(entries: Sequence[TokenLogprobs], spelling: Spelling) -> dict[str, Any]:
    """``logprobs`` of ``/v1/chat/completions``."""
    content = [
        {
            **_spelt(entry.token_id, entry.logprob, spelling),
            "top_logprobs": [_spelt(token, own, spelling) for token, own in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _spelt(token: int, logprob: float | None, spelling: Spelling) -> dict[str, Any]:
    text, data = spelling(token)
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def of_prompt(entries: Sequence[TokenLogprobs], spelling: Spelling) -> list[dict[str, Any] | None]:
    """VLLM's ``prompt_logprobs``: by token id; ``None`` for the first token."""
    return [None if entry.logprob is None else _by_id(entry, spelling) for entry in entries]


def _by_id(entry: TokenLogprobs, spelling: Spelling) -> dict[str, Any]:
    found = {}
    for rank, (token, logprob) in enumerate(entry.top, 1):
        found[str(token)] = _ranked(token, logprob, rank, spelling)
    own = _ranked(entry.token_id, entry.logprob, entry.rank, spelling)
    return {str(entry.token_id): own, **found}


def _ranked(token: int, logprob: float | None, rank: int, spelling: Spelling) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": spelling(token)[0]}
