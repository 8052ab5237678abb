"""The files that a tokenizer is made of, in one zip archive."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "chat_template.json", "vocab.json", "merges.txt"),
    *("*.jinja", "*.model", "*.tiktoken"),
)
_SAME_DATE = (1980, 1, 1, 0, 0, 0)  # so that the same files give the same archive


@dataclass(frozen=True, slots=True)
class Bundle:
    """An archive and its digest."""

    data: bytes
    sha256: str  # hexadecimal


def bundle(folder: Path) -> Bundle:
    """Of a local Hugging Face directory."""
    files = sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, _SAME_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    data = out.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())
