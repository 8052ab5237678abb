"""Text to tokens, tokens to text as they come, and stop strings in that text."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as RustTokenizer

from neo_server.errors import ConfigurationError, InvalidRequestError

# One text at a time gains nothing from a thread pool of the size of the machine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_MANY_TOKENS = 1024
_PIECES = 16384  # tokens whose bytes are kept, of each tokenizer
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A checkpoint's ``tokenizer.json``."""

    def __init__(self, rust: RustTokenizer) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        decoder = json.loads(rust.to_str())["decoder"]
        self._byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        added = rust.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self.longest_token = max(map(len, rust.get_vocab()), default=1)  # characters
        self.prefix = self._special_prefix()  # ids that begin every text
        self.piece = lru_cache(_PIECES)(self._piece)
        self._plain = next(iter(self.encode("a", add_special_tokens=False)), 0)
        self._plain_length = len(self.decode([self._plain], skip_special_tokens=False))

    def _special_prefix(self) -> list[int]:
        """What the post-processor puts before a text: a BOS, or nothing."""
        plain = self.encode("a", add_special_tokens=False)
        whole = self.encode("a")
        starts = range(len(whole) - len(plain) + 1)
        at = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
        return whole[:at]

    @staticmethod
    def from_pretrained(path: str | Path) -> Tokenizer:
        """Reads ``tokenizer.json`` of a local directory."""
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            raise ConfigurationError(f"no tokenizer.json in {path}")
        return Tokenizer(RustTokenizer.from_file(str(file)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with what the tokenizer's own post-processor adds (a BOS, for instance).

        Other threads run meanwhile: of the library's functions only those for batches release the
        GIL.
        """
        (encoding,) = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, which writes its special tokens itself.

        Where the tokenizer begins texts with a BOS and the template has written none, one is added.
        """
        ids = self.encode(text, add_special_tokens=False)
        return ids if ids[: len(self.prefix)] == self.prefix else [*self.prefix, *ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the whole. As for ``encode``, other threads run meanwhile if it is long."""
        text: str
        if len(ids) < _MANY_TOKENS:  # where the batch's own cost would show
            text = self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._rust.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental detokenizer."""
        if self._byte_level:
            return ByteLevelDetokenizer(self, skip_special_tokens)
        return WindowDetokenizer(self, skip_special_tokens)

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """The token as the vocabulary spells it; ``None`` for skipped and unknown ids."""
        if skip_special_tokens and token_id in self._special:
            return None
        token: str | None = self._rust.id_to_token(token_id)
        return token

    def _piece(self, token_id: int, skip_special_tokens: bool) -> tuple[bytes, str | None]:
        """Of a byte-level token: its bytes, and their text if they are whole characters.

        Skipped and unknown ids have none.
        """
        token = self.token(token_id, skip_special_tokens=skip_special_tokens)
        data = b"" if token is None else _bytes_of(token)
        try:
            return data, data.decode()
        except UnicodeDecodeError:
            return data, None

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        """One token by itself, special or not: as text, and as the bytes that it stands for."""
        token = self.token(token_id, skip_special_tokens=False)
        if token is not None and self._byte_level:
            data = _bytes_of(token)
            return data.decode(errors="replace"), data
        if token is not None and _BYTE_TOKEN.fullmatch(token):
            data = bytes([int(token[3:5], 16)])
            return data.decode(errors="replace"), data
        # A decoder that strips a text's first space would strip the token's: let one go before.
        other = [self._plain, token_id]
        text = self.decode(other, skip_special_tokens=False)[self._plain_length :]
        return text, text.encode()


class NoTokenizer:
    """For token ids alone: outputs have no text."""

    longest_token = 1  # characters
    prefix: Sequence[int] = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ``InvalidRequestError``."""
        raise InvalidRequestError(
            "prompt is text; without a tokenizer it must be token_ids", "prompt"
        )

    def encode_chat(self, text: str) -> list[int]:
        """Raises ``InvalidRequestError``."""
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises ``InvalidRequestError``."""
        raise InvalidRequestError("there is no tokenizer: tokens have no text", "tokens")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """One that finds no text."""
        return NoDetokenizer()

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        """The id: there is nothing else."""
        text = f"token_id:{token_id}"
        return text, text.encode()


AnyTokenizer = Tokenizer | NoTokenizer


class Detokenizer(Protocol):
    """Text of a growing list of tokens.

    What ``feed`` and ``flush`` return, joined, is the text of the whole list; each part consists
    of whole characters.
    """

    def feed(self, token_id: int) -> str:
        """The text that is certain now and was not before."""

    def flush(self) -> str:
        """The rest: an incomplete character becomes U+FFFD."""


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 is itself, all else starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """Of a byte-level token."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


class ByteLevelDetokenizer:
    """For byte-level vocabularies: tokens are bytes, so UTF-8 is decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_open = False  # in the middle of a character

    def feed(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        data, text = self._tokenizer.piece(token_id, self._skip)
        if text is None or self._is_open:
            text = self._utf8.decode(data)
            self._is_open = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """See ``Detokenizer``."""
        self._is_open = False
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes the last tokens together with those just before them.

    A run of byte tokens is held back to its end, because one invalid byte changes how the whole
    run is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._done = 0  # tokens of the window whose text has been returned

    def feed(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        token = self._tokenizer.token(token_id, skip_special_tokens=self._skip)
        if token is None:
            return ""
        self._window.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        return self._take()

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._take()

    def _take(self) -> str:
        before = self._decode(self._window[: self._done])
        text = self._decode(self._window)[len(before) :]
        del self._window[: self._done]
        self._done = len(self._window)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class NoDetokenizer:
    """For engines without a tokenizer."""

    def feed(self, token_id: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


class StopStrings:
    """Finds the first stop string in a text that comes in parts, however it is cut.

    First is the one that ends first; of those, the longest. Text that may be the beginning of a
    stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if one is complete.

        Without ``check`` the text passes and can be no part of a match.
        """
        if not (self._stop and check):
            return self.flush() + text, None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = max(self._overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back; no stop string comes any more."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
