from __future__ import annotations

import pytest

from neo_server.http.logprobs import of_chat, of_completion, of_prompt
from neo_server.sampling import TokenLogprobs
from neo_server.tokenizer import NoTokenizer
from tests.unit.neo_server.test_tokenizer import TOKENIZERS

ENTRIES = (
    TokenLogprobs(1, None, 0, ()),
    TokenLogprobs(2, -3.0, 9, ((4, -0.5), (5, -1.5)), text_offset=3),
    TokenLogprobs(4, -0.25, 1, ((4, -0.25), (6, -2.0)), text_offset=5),
)


def spelling(token: int) -> tuple[str, bytes]:
    """Tokens 5 and 6 look alike."""
    return {5: "x", 6: "x"}.get(token, f"t{token}"), bytes([token])


def test_a_completion_has_columns_and_the_drawn_token_among_the_likeliest() -> None:
    assert of_completion(ENTRIES, spelling) == {
        "tokens": ["t1", "t2", "t4"],
        "token_logprobs": [None, -3.0, -0.25],
        "top_logprobs": [None, {"t4": -0.5, "x": -1.5, "t2": -3.0}, {"t4": -0.25, "x": -2.0}],
        "text_offset": [0, 3, 5],
    }


def test_a_chat_has_a_list_with_bytes() -> None:
    (entry,) = of_chat(ENTRIES[1:2], spelling)["content"]
    assert entry == {
        "token": "t2",
        "logprob": -3.0,
        "bytes": [2],
        "top_logprobs": [
            {"token": "t4", "logprob": -0.5, "bytes": [4]},
            {"token": "x", "logprob": -1.5, "bytes": [5]},
        ],
    }


def test_a_prompt_has_them_by_token_id_with_ranks() -> None:
    first, second, _ = of_prompt(ENTRIES, spelling)
    assert first is None
    assert second == {
        "2": {"logprob": -3.0, "rank": 9, "decoded_token": "t2"},
        "4": {"logprob": -0.5, "rank": 1, "decoded_token": "t4"},
        "5": {"logprob": -1.5, "rank": 2, "decoded_token": "x"},
    }


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_a_texts_tokens_joined_are_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "the quick brown fox, 안녕 😀 é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(tokenizer.spelling(token)[1] for token in ids)
    assert data.decode().strip() == tokenizer.decode(ids).strip()


def test_special_tokens_have_a_spelling_and_ids_do_without_a_tokenizer() -> None:
    tokenizer = TOKENIZERS["byte level"]
    for token in tokenizer.prefix:
        assert tokenizer.spelling(token)[0]
    assert NoTokenizer().spelling(7) == ("token_id:7", b"token_id:7")
