"""The requests of a benchmark: lengths from flags or a trace, token ids at random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neo_server.errors import ConfigurationError
from neo_server.simulator.workload import Lengths, limited, read_trace, synthetic

DEFAULT_PROMPTS = 100  # where lengths are synthetic; of a trace all


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request; it generates exactly ``num_output`` tokens."""

    ids: list[int]
    num_output: int


def lengths_of(
    dataset_path: Path | None,
    input_len: int,
    output_len: int,
    num_prompts: int | None,
    max_model_len: int,
    seed: int,
    range_ratio: float = 0.0,
) -> Lengths:
    """Prompt and output lengths. A trace's first ``num_prompts`` that fit in ``max_model_len``.

    Raises ``ConfigurationError`` where nothing is left, or what was asked for cannot fit.
    """
    for name, value in (("input-len", input_len), ("output-len", output_len)):
        if value < 1:
            raise ConfigurationError(f"--{name} is {value}; it must be at least 1")
    if dataset_path is not None:
        trace = _read(dataset_path)
        fitting = limited(trace, max_model_len, num_prompts or len(trace))
        if not fitting:
            raise ConfigurationError(
                f"{dataset_path} holds no request of at most max_model_len, {max_model_len}, tokens"
            )
        return fitting
    count = num_prompts or DEFAULT_PROMPTS
    lengths = synthetic(input_len, output_len, count, seed, range_ratio)
    longest = max(map(sum, lengths))
    if longest > max_model_len:
        raise ConfigurationError(
            f"--input-len and --output-len give {longest} tokens together; max_model_len is "
            f"{max_model_len}"
        )
    return lengths


def _read(path: Path) -> Lengths:
    try:
        return read_trace(path)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no CSV with ContextTokens and GeneratedTokens and no JSON list of objects "
            f"with prompt and max_tokens: {error!r}"
        ) from error


def prompts_of(lengths: Lengths, vocab_size: int, seed: int) -> list[Prompt]:
    """Uniformly random token ids; no two prompts share a beginning but by chance."""
    rng = np.random.default_rng(seed)
    return [
        Prompt(rng.integers(0, vocab_size, num_prompt).tolist(), num_output)
        for num_prompt, num_output in lengths
    ]
