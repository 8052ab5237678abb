"""Stop strings in text that tokens cut anywhere, and one text whichever way it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.helpers.server import Generation, RunningServer, request_of, running_server

TOKENS = 48
# Written by biasing: the demo model is made to say what has several bytes a character.
TEXTS = [
    "😀🎉👩\u200d👩\u200d👧\u200d👦🚀 ok",
    "안녕하세요 세계",
    "e\u0301a\u0308o\u0302 nai\u0308ve",
    "one, two, three",
]


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--http-port", "0", "--max-model-len", "256", "--scheduling-policy", "mixed"]
    flags += ["--no-profile"]
    with running_server(demo_model, tmp_path_factory.mktemp("stops"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


def said(
    server: RunningServer, tokenizer: Tokenizer, text: str
) -> tuple[dict[str, Any], Generation]:
    """An HTTP body that makes the model say tokens of ``text`` in its own order, and the output."""
    ids = sorted(set(tokenizer.encode(text, add_special_tokens=False).ids))
    request = request_of(text, TOKENS, temperature=1.2, seed=5)
    for token in ids:
        request.sampling_params.logit_bias[token] = 30.0
    body = {"prompt": text, "max_tokens": TOKENS, "temperature": 1.2, "seed": 5}
    body |= {"logit_bias": {str(token): 30.0 for token in ids}, "ignore_eos": True}
    return body, server.generate(request)


def unary_and_streamed(server: RunningServer, body: dict[str, Any]) -> tuple[str, str]:
    url = f"http://{server.http_address}/v1/completions"
    reply = httpx.post(url, json=body, timeout=240.0)
    assert reply.status_code == 200, reply.text
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=240.0) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    parts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    return reply.json()["choices"][0]["text"], "".join(parts)


@pytest.mark.parametrize("text", TEXTS, ids=["emoji", "hangul", "combining", "plain"])
def test_streamed_and_unary_texts_are_the_decoded_whole(
    server: RunningServer, tokenizer: Tokenizer, text: str
) -> None:
    body, free = said(server, tokenizer, text)
    whole = tokenizer.decode(free.token_ids)
    assert len(free.token_ids) == TOKENS
    assert any(ord(character) > 127 for character in whole) == (not text.isascii())
    assert free.text == whole
    assert unary_and_streamed(server, body) == (whole, whole)


@pytest.mark.parametrize("text", TEXTS, ids=["emoji", "hangul", "combining", "plain"])
def test_a_stop_string_across_tokens_is_neither_leaked_nor_missed(
    server: RunningServer, tokenizer: Tokenizer, text: str
) -> None:
    body, free = said(server, tokenizer, text)
    ids = free.token_ids
    # From the middle of one token's text into the next one's.
    cut = next(
        len(tokenizer.decode(ids[:i]))
        for i in range(8, TOKENS)
        if not tokenizer.decode(ids[:i]).endswith("\ufffd") and len(tokenizer.decode(ids[:i])) > 3
    )
    stop = free.text[cut - 1 : cut + 2]
    expected = free.text[: free.text.index(stop)]
    request = request_of(text, TOKENS, temperature=1.2, seed=5)
    for token, bias in body["logit_bias"].items():
        request.sampling_params.logit_bias[int(token)] = bias
    request.stop_conditions.stop.extend(["never said", stop])
    result = server.generate(request)
    assert (result.text, result.finish.stop_str) == (expected, stop)
    assert unary_and_streamed(server, body | {"stop": ["never said", stop]}) == (expected, expected)
    request.stop_conditions.include_stop_str_in_output = True
    assert server.generate(request).text == expected + stop


def test_text_held_back_for_a_stop_string_that_never_ends_is_flushed(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    body, free = said(server, tokenizer, TEXTS[1])
    body["stop"] = free.text[-2:] + "never"
    assert unary_and_streamed(server, body) == (free.text, free.text)
