"""What ``neo bench throughput`` runs on an engine: one work, or several of ``--sweep``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neo_server.bench.workload import lengths_of
from neo_server.errors import ConfigurationError
from neo_server.simulator.workload import Lengths

_FIXED = re.compile("([0-9]+)/([0-9]+)")
_COUNTED = re.compile("(.+):([0-9]+)")


@dataclass(frozen=True, slots=True)
class Work:
    """Requests that are submitted at once; lengths in tokens, fixed or of a trace."""

    input_len: int
    output_len: int
    num_prompts: int | None  # None: the default
    dataset_path: Path | None
    name: str | None = None  # as ``--sweep`` gives it

    def lengths(self, max_model_len: int, seed: int, range_ratio: float) -> Lengths:
        """As ``lengths_of``. Raises ``ConfigurationError``, which names the work."""
        try:
            return lengths_of(
                *(self.dataset_path, self.input_len, self.output_len, self.num_prompts),
                *(max_model_len, seed, range_ratio),
            )
        except ConfigurationError as error:
            if self.name is None:
                raise
            raise ConfigurationError(f"--sweep {self.name}: {error}") from error


def swept(texts: Sequence[str], num_prompts: int | None) -> list[Work]:
    """The works of ``--sweep``: ``INPUT/OUTPUT`` or a trace's path, ``:REQUESTS`` behind it.

    ``num_prompts``: where that is left out. Raises ``ConfigurationError``.
    """
    return [_work(text, num_prompts) for text in texts]


def _work(text: str, num_prompts: int | None) -> Work:
    what, count = text, num_prompts
    if found := _COUNTED.fullmatch(text):
        what, count = found[1], int(found[2])
    if fixed := _FIXED.fullmatch(what):
        input_len, output_len, path = int(fixed[1]), int(fixed[2]), None
    else:
        input_len, output_len, path = 1, 1, Path(what)
    known = path is None or path.is_file()
    if not known or count == 0 or not (input_len and output_len):
        raise ConfigurationError(
            f"--sweep is {text!r}; it must be INPUT/OUTPUT, tokens of a prompt and of its output, "
            "or the path of a trace, with :REQUESTS behind it if wanted; all numbers at least 1"
        )
    return Work(input_len, output_len, count, path, text)
