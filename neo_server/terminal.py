"""What ``neo generate`` and ``neo chat`` print."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from neo_server.client import Client
from neo_server.params import SamplingParams


def print_answers(
    client: Client, prompts: Sequence[str], params: SamplingParams, *, chat: bool
) -> None:
    """Streams each prompt's completion to stdout, one after the other."""
    for prompt in prompts:
        asked = [{"role": "user", "content": prompt}] if chat else prompt
        for delta in client.stream(asked, params):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
