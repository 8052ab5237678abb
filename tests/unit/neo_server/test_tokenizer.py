from __future__ import annotations

import asyncio
import functools
import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from neo_server.tokenizer import (
    _BYTES,
    ByteLevelDetokenizer,
    StopStrings,
    Tokenizer,
    WindowDetokenizer,
)

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "Emoji: 😀🎉🚀👩‍👩‍👧‍👦 and é, ü, ñ",
    "안녕하세요, 저는 학생입니다. 今日は天気がいい。",
    "Привет, как дела? مرحبا",
]


def byte_level() -> Tokenizer:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<s>"],
        show_progress=False,
    )
    rust.train_from_iterator(TEXTS, trainer)
    rust.add_tokens([AddedToken("<tool 工具>", special=False)])
    rust.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(rust)


def byte_fallback() -> Tokenizer:
    """The shape of Llama 2's: Metaspace, byte tokens, a stripped leading space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz,.é안한", "▁t", "he", "▁the"]
    rust = RustTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(rust)


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def test_a_chat_prompt_begins_with_one_bos_whoever_writes_it() -> None:
    with_bos, without = TOKENIZERS["byte level"], TOKENIZERS["byte fallback"]
    assert with_bos.encode("the fox")[0] == 1
    expected = [1, *with_bos.encode("the fox", add_special_tokens=False)]
    assert with_bos.encode_chat("the fox") == with_bos.encode_chat("<s>the fox") == expected
    assert 1 not in without.encode_chat("the he")
    assert without.encode_chat("<s>the he").count(1) == 1


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_the_event_loop_turns_while_many_tokens_are_detokenised(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    part = tokenizer.encode("<s>the quick fox ")
    for skip in (True, False):
        decode = functools.partial(tokenizer.decode, part * 20_000, skip_special_tokens=skip)
        work = asyncio.create_task(asyncio.to_thread(decode))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 50
        assert (await work).count("<s>") == (0 if skip else 20_000 * part.count(1))
        assert (await work).count("quick fox") == 20_000


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_the_event_loop_turns_while_a_long_text_is_tokenised(name: str) -> None:
    text = "the quick fox " * 40_000
    work = asyncio.create_task(asyncio.to_thread(TOKENIZERS[name].encode, text))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 50
    assert TOKENIZERS[name].decode(await work) == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens_than_the_longest_token_allows(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in ("the quick fox", "\u00e9\u00e9\U0001f600", "x" * 500):
        assert len(text) <= len(tokenizer.encode(text)) * tokenizer.longest_token


def vocabulary(tokenizer: Tokenizer) -> int:
    return int(tokenizer._rust.get_vocab_size())


@pytest.fixture(params=TOKENIZERS, name="tokenizer")
def _tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def test_each_kind_of_vocabulary_gets_its_detokenizer() -> None:
    assert isinstance(TOKENIZERS["byte level"].detokenizer(), ByteLevelDetokenizer)
    assert isinstance(TOKENIZERS["byte fallback"].detokenizer(), WindowDetokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_of_an_encoded_text_join_to_it_and_hold_whole_characters(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.feed(token) for token in ids]
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_deltas_of_any_token_stream_join_to_the_decoded_whole(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, vocabulary(tokenizer) - 1), max_size=40))
    detokenizer = tokenizer.detokenizer()
    joined = "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()
    assert joined == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(40))
def test_deltas_of_random_bytes_join_to_the_decoded_whole(tokenizer: Tokenizer, seed: int) -> None:
    choice = random.Random(seed)
    single = [
        token
        for token in range(vocabulary(tokenizer))
        if (spelled := tokenizer.token(token)) and (len(spelled) == 1 or spelled.startswith("<0x"))
    ]
    ids = choice.choices(single, k=200)
    detokenizer = tokenizer.detokenizer()
    joined = "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()
    assert joined == tokenizer.decode(ids)


def test_a_delta_never_ends_inside_a_character() -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_of = {tokenizer.token(i): i for i in range(vocabulary(tokenizer))}
    alphabet = {v: k for k, v in _BYTES.items()}
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.feed(token_of[alphabet[byte]]) for byte in "é😀한".encode()]
    assert deltas == ["", "é", "", "", "", "😀", "", "", "한"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    start = tokenizer._rust.token_to_id("<0xF0>")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed(start) == ""
    assert detokenizer.flush() == "\ufffd" == tokenizer.decode([start])
    assert detokenizer.flush() == ""


def test_special_tokens_give_no_text_and_break_no_character() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("안", add_special_tokens=False)
    mixed = [0, *(token for pair in ((i, 0) for i in ids) for token in pair)]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.feed(token) for token in mixed) == "안" == tokenizer.decode(mixed)


def test_encode_adds_what_the_post_processor_adds_and_never_truncates() -> None:
    source = json.loads(TOKENIZERS["byte level"]._rust.to_str())
    source["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = Tokenizer(RustTokenizer.from_str(json.dumps(source)))
    ids = tokenizer.encode(TEXTS[0])
    assert ids[0] == 1
    assert ids[1:] == tokenizer.encode(TEXTS[0], add_special_tokens=False)
    assert len(ids) > 4


def _first_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Character by character: the first end, then the earliest start."""
    for end in range(1, len(text) + 1):
        ending = [(end - len(s), s) for s in stops if text[:end].endswith(s)]
        if ending:
            start, stop = min(ending)
            return start, end, stop
    return None


@given(
    text=st.text("ab\n", max_size=24),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_a_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopStrings(stops, include_in_output=include)
    edges = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    shown, matched = "", None
    for start, end in pairwise(edges):
        part, matched = matcher.feed(text[start:end])
        shown += part
        if matched is not None:
            break
    expected = _first_match(text, stops)
    if expected is None:
        assert matched is None
        assert shown + matcher.flush() == text
    else:
        start, end, stop = expected
        assert matched == stop
        assert shown == text[: end if include else start]


def test_text_that_may_become_a_stop_string_is_held_and_then_released() -> None:
    matcher = StopStrings(["</end>"])
    assert matcher.feed("hi </e") == ("hi ", None)
    assert matcher.feed("lse") == ("</else", None)
    assert matcher.feed("</en") == ("", None)
    assert matcher.flush() == "</en"


def test_unchecked_text_passes_and_is_no_part_of_a_match() -> None:
    matcher = StopStrings(["abc"])
    assert matcher.feed("ab", check=False) == ("ab", None)
    assert matcher.feed("c") == ("c", None)
