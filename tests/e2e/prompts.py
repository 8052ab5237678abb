"""Two dozen prompts: text, chat, code, other scripts, one token, more than 500 tokens."""

from __future__ import annotations

_STORY = (
    "The lighthouse keeper counted the ships as they passed, one by one, and wrote their names "
    "in a book that nobody had ever asked to read. "
)
_LOG = "2024-03-0{0} 12:0{0}:4{0} INFO worker {0} took {0}{0} ms for job {0}7{0}\n"


def chat(user: str) -> str:
    """A conversation in the demo model's template."""
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three laws of thermodynamics state that",
    "To make bread you need flour, water, salt and",
    "In 1969, the first person to walk on the Moon",
    chat("Why is the sky blue?"),
    chat("Write a haiku about autumn."),
    chat("List five fruits, one per line."),
    chat("What is 17 times 23? Explain step by step."),
    chat("Translate 'good morning' into French, Spanish and German."),
    "def fibonacci(n: int) -> int:\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "Ada", "languages": ["Python", "C++"], "address": {',
    "Привет, как дела? Сегодня хорошая погода и",
    "今日は天気がいいので、",
    "안녕하세요, 저는",
    "مرحبا بالعالم، اسمي",
    "Emoji: 😀 🎉 🚀 👩‍👩‍👧‍👦 and now",
    "A",
    " the",
    _STORY * 17 + "At last,",
    "".join(_LOG.format(i % 10) for i in range(14)) + "2024-03-0",
)
