"""How tokens are drawn and what is told of them: the parts of a request that workers carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from neo_native import Feature

PRIORITY_STEP = 1 << 40  # sequences of one priority are numbered below it
MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn; see protos/inference.proto."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # alternatives told beside each output token; None: not even its
    prompt_logprobs: int | None = None
    min_tokens: int = 0  # of output, before one of ``held_back`` may be drawn
    held_back: tuple[int, ...] = ()

    @property
    def features(self) -> Feature:
        """What its slot wants beyond drawing a token."""
        found = Feature(0)
        if self.logit_bias or self.held_back:
            found |= Feature.BIASES
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0:
            found |= Feature.PENALTIES
        if self.logprobs is not None:
            found |= Feature.LOGPROBS
        if self.prompt_logprobs is not None:
            found |= Feature.PROMPT_LOGPROBS
        return found


class TokenLogprobs(NamedTuple):
    """Of one token: by the model alone, without temperature, penalties and biases."""

    token_id: int
    logprob: float | None  # None: a prompt's first token
    rank: int  # 1: the likeliest; 0 for None
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, the likeliest first
    text_offset: int = 0  # characters of text before the token's own


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What an answer holds beside the output."""

    echo: bool = False
    skip_special_tokens: bool = True


PLAIN = ResponseOptions()


def sequence_id(number: int, priority: int) -> int:
    """Ids order by priority, then arrival: queues and policies know no other order."""
    return priority * PRIORITY_STEP + number
