"""The requests of ``neo bench serve`` and when they are sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neo_server.bench.workload import lengths_of, prompts_of
from neo_server.errors import ConfigurationError

_OUTPUT_KEYS = ("max_tokens", "output_len", "output_tokens")  # of a JSONL line, the first there is


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: str | list[int]
    max_tokens: int


def random_jobs(
    trace: Path | None,
    input_len: int,
    output_len: int,
    num_prompts: int | None,
    range_ratio: float,
    *,
    vocab_size: int,
    max_model_len: int,
    seed: int,
) -> list[Job]:
    """Random token ids of given lengths, or of a trace's. Raises ``ConfigurationError``."""
    lengths = lengths_of(
        trace, input_len, output_len, num_prompts, max_model_len, seed, range_ratio
    )
    return [Job(one.ids, one.num_output) for one in prompts_of(lengths, vocab_size, seed)]


def jsonl_jobs(path: Path, output_len: int, num_prompts: int | None, seed: int) -> list[Job]:
    """A prompt a line: an object with ``prompt`` (a text or token ids), and how long its answer is.

    The latter is ``max_tokens``, ``output_len`` or ``output_tokens``; without one, ``output_len``
    of the command. More prompts than lines are drawn from the lines at random. Raises
    ``ConfigurationError`` that names the line.
    """
    with path.open(encoding="utf-8") as file:
        jobs = [
            _job(path, number, line, output_len)
            for number, line in enumerate(file, 1)
            if line.strip()
        ]
    if not jobs:
        raise ConfigurationError(f"{path} holds no request")
    count = num_prompts or len(jobs)
    more = np.random.default_rng(seed).integers(0, len(jobs), max(0, count - len(jobs)))
    return [*jobs[:count], *(jobs[i] for i in more)]


def _job(path: Path, number: int, line: str, output_len: int) -> Job:
    try:
        item: Any = json.loads(line)
        prompt = item["prompt"]
        if not isinstance(prompt, str):
            prompt = [int(token) for token in prompt]
        given = next((item[key] for key in _OUTPUT_KEYS if item.get(key) is not None), output_len)
        max_tokens = int(given)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{path}, line {number}: {error!r}; see --help") from error
    if not prompt or max_tokens < 1:
        raise ConfigurationError(f"{path}, line {number}: prompt is empty or max_tokens below 1")
    return Job(prompt, max_tokens)


def send_times(count: int, rate: float, burstiness: float, seed: int) -> Sequence[float]:
    """Seconds from the start at which requests are sent; ``rate`` per second, infinite: at once.

    Gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less is
    burstier, more is steadier.
    """
    if rate == float("inf"):
        return [0.0] * count
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count)
    return [float(at) for at in np.cumsum(gaps)]
