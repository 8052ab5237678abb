"""Requests to simulate: their lengths and when they arrive."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neo_server.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    num_prompt: int
    num_output: int


Lengths = list[tuple[int, int]]  # prompt, output


def read_trace(path: Path) -> Lengths:
    """Lengths of a public trace.

    A CSV with the columns ContextTokens and GeneratedTokens (Azure's LLM inference traces), or a
    JSON list of objects with ``prompt`` (a length, or tokens) and ``max_tokens`` (OSC).
    """
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)
            ]
    else:
        rows = [
            (_length(item["prompt"]), int(item["max_tokens"]))
            for item in json.loads(path.read_text(encoding="utf-8"))
        ]
    lengths = [(prompt, output) for prompt, output in rows if prompt > 0 and output > 0]
    if not lengths:
        raise ConfigurationError(f"trace {path} holds no request")
    return lengths


def _length(prompt: int | list[int]) -> int:
    return prompt if isinstance(prompt, int) else len(prompt)


def synthetic(
    num_prompt: int, num_output: int, count: int, seed: int = 0, spread: float = 0.1
) -> Lengths:
    """Both uniform within a share of their means: a tenth in arXiv 2411.01142, section 6.1."""
    rng = random.Random(seed)

    def draw(mean: int) -> int:
        return max(1, round(rng.uniform((1.0 - spread) * mean, (1.0 + spread) * mean)))

    return [(draw(num_prompt), draw(num_output)) for _ in range(count)]


def limited(lengths: Lengths, max_model_len: int, count: int) -> Lengths:
    """The first ``count`` that fit."""
    return [pair for pair in lengths if sum(pair) <= max_model_len][:count]


def arrivals(lengths: Lengths, rate: float | None, seed: int = 0) -> list[Arrival]:
    """A Poisson process of ``rate`` requests per second, or all at once."""
    return list(_arrive(lengths, rate, random.Random(seed)))


def _arrive(lengths: Lengths, rate: float | None, rng: random.Random) -> Iterator[Arrival]:
    now = 0.0
    for num_prompt, num_output in lengths:
        if rate is not None:
            now += rng.expovariate(rate)
        yield Arrival(now, num_prompt, num_output)
