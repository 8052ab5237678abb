"""Chat templates of Hugging Face checkpoints, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def from_pretrained(path: str | Path) -> ChatTemplate | None:
        """Template of a local checkpoint directory; ``None`` where it has none."""
        folder = Path(path)
        config_path = folder / "tokenizer_config.json"
        config: dict[str, Any] = (
            json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        )
        separate = folder / "chat_template.jinja"
        source = separate.read_text(encoding="utf-8") if separate.exists() else None
        source = source or _default_template(config.get("chat_template"))
        if source is None:
            return None
        return ChatTemplate(source, _special_tokens(config))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation; ``messages`` have ``role`` and ``content``.

        Raises ``ValueError`` with the template's own complaint.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError) as error:  # a template may add what is no text
            raise ValueError(f"the chat template refuses them: {error}") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _default_template(value: object) -> str | None:
    """``chat_template`` is a string, or a list of named ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        template = named.get("default")
        return template if isinstance(template, str) else None
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
