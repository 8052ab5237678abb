"""What a client asked for (``Request``) and the sequence of tokens that it becomes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import chain
from typing import NamedTuple

from neo_server.errors import NeoError
from neo_server.plan import Place, SeqView
from neo_server.sampling import PLAIN, ResponseOptions, SamplingParams, TokenLogprobs
from neo_server.tokenizer import AnyTokenizer, Detokenizer, StopStrings

__all__ = [
    "Finish",
    "FinishReason",
    "Output",
    "OutputStream",
    "Request",
    "SamplingParams",
    "Sequence",
    "State",
    "StopConditions",
    "joined",
]


class FinishReason(IntEnum):
    """``FinishReason`` of protos/inference.proto."""

    STOP = 1
    LENGTH = 2
    ABORT = 3

    @property
    def name_in_proto(self) -> str:
        """The enumerator's name there."""
        return f"FINISH_REASON_{self.name}"


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no cache
    RUNNING = "running"  # holds a slot and cache
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a request is over; the end-of-sequence ids are among ``stop_token_ids``."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_str: str | None = None


class Output(NamedTuple):
    """What happened since the reader last looked. One is made for every token of every stream."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the output's tokens, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # once, if asked for


def joined(outputs: SequenceOf[Output]) -> Output:
    """Several of one request as one."""
    return Output(
        text="".join(output.text for output in outputs),
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        finish=outputs[-1].finish if outputs else None,
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
        prompt_logprobs=tuple(chain.from_iterable(output.prompt_logprobs for output in outputs)),
    )


class OutputStream:
    """From the engine to one client, its only reader. A slow one gets fewer, larger outputs.

    It never holds more than the request's own output, which max_model_len bounds.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._finish: Finish | None = None
        self._error: NeoError | None = None
        self._changed = False
        self._reader: asyncio.Future[None] | None = None  # waits for a change
        self._over = asyncio.Event()

    def push(self, text: str, token_ids: SequenceOf[int], finish: Finish | None = None) -> None:
        """Adds output; ``finish`` with the last of it."""
        if text:
            self._text.append(text)
        self._token_ids.extend(token_ids)
        self._finish = finish
        self._wake()
        if finish is not None:
            self._over.set()

    def tell(
        self, logprobs: SequenceOf[TokenLogprobs], prompt: SequenceOf[TokenLogprobs] = ()
    ) -> None:
        """Adds log-probabilities to what the next ``push`` brings."""
        self._logprobs.extend(logprobs)
        self._prompt_logprobs.extend(prompt)

    def fail(self, error: NeoError) -> None:
        """Ends the stream with an error, the first one."""
        self._error = self._error or error
        self._wake()
        self._over.set()

    def _wake(self) -> None:
        self._changed = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def pending_tokens(self) -> int:
        """Tokens that the reader has not taken yet."""
        return len(self._token_ids)

    async def over(self) -> None:
        """Waits until the request has ended; one ``next`` then takes the whole."""
        await self._over.wait()

    async def next(self) -> Output:
        """Waits for output and takes all there is. Raises the error that ended the request."""
        if not self._changed:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error
        output = Output("".join(self._text), tuple(self._token_ids), self._finish)
        self._text.clear()
        self._token_ids.clear()
        if self._logprobs or self._prompt_logprobs:
            output = output._replace(
                logprobs=tuple(self._logprobs), prompt_logprobs=tuple(self._prompt_logprobs)
            )
            self._logprobs.clear()
            self._prompt_logprobs.clear()
        self._changed = self._finish is not None
        return output


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, where their KV cache is, and what it takes there. Only the scheduler changes it."""

    id: int  # by priority, then arrival
    tokens: array[int]  # int32: prompt, then output
    num_prompt: int
    sampling: SamplingParams
    state: State = State.WAITING
    place: Place = Place.NOWHERE
    num_computed: int = 0  # tokens in the cache, or put there by a plan in flight
    pending: int = 0  # tokens that plans in flight will append
    epoch: int = 0  # grows whenever the rows in flight are given up
    arrived_s: float = 0.0  # by the scheduler's clock
    max_len: int = 1 << 30  # prompt and output together; no row is planned beyond it
    slot: int | None = None  # row of the sequence table
    blocks: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    last_plan: int = 0  # the last one that names it
    moved_plan: int = 0  # the last one that swaps it
    num_gpu_decodes: int = 0
    num_cpu_decodes: int = 0
    num_preemptions: int = 0
    skipped: int = 0  # iterations in a row that left it, a CPU decode, out
    ride: int = 0  # linear stages of its next token that are done, plans in flight included
    ride_place: int = 0  # its place in its group, while ``ride`` > 0
    logprobs: TokenLogprobs | None = None  # of the latest output token, if asked for
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position

    @property
    def num_planned(self) -> int:
        """Tokens, those on their way included."""
        return len(self.tokens) + self.pending

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    def view(self) -> SeqView:
        """What a policy sees of it."""
        held = len(self.pages) if self.place is Place.CPU else len(self.blocks)
        return SeqView(
            *(self.id, self.place, self.num_planned, self.num_computed),
            *(held, self.skipped, self.ride),
        )


@dataclass(slots=True, eq=False)
class Request:
    """One client's request while it is served."""

    request_id: str
    sequence: Sequence
    stop: StopConditions
    detokenizer: Detokenizer
    stop_strings: StopStrings
    stream: OutputStream
    arrived_at: float = 0.0  # by the engine's clock, as those below
    planned_at: float | None = None  # the first plan that names it
    token_at: float | None = None  # the latest token
    finish: Finish | None = None
    index: int = 0  # of the completion, where one prompt has several
    options: ResponseOptions = PLAIN
    tokenizer: AnyTokenizer | None = None  # for the prompt's text, where it is echoed
    text_length: int = 0  # characters of text so far, held back or not

    def accept(self, token: int) -> None:
        """Takes a token that the scheduler has appended already, and streams what it gives."""
        num_output = self.sequence.num_output
        if num_output == 1:
            self._open()
        if (entry := self.sequence.logprobs) is not None:
            self.stream.tell([entry._replace(text_offset=self.text_length)])
        may_stop = num_output > self.stop.min_tokens
        if may_stop and token in self.stop.stop_token_ids:
            text = self._text_of(token) if self.stop.include_stop_str_in_output else ""
            self.end(Finish(FinishReason.STOP, stop_token_id=token), (token,), text)
            return
        text, stop_str = self._text_of(token), None
        if self.stop.stop:
            text, stop_str = self.stop_strings.feed(text, check=may_stop)
        if stop_str is not None:
            self.finish = Finish(FinishReason.STOP, stop_str=stop_str)
            self.stream.push(text, (token,), self.finish)
        elif num_output >= self.stop.max_tokens:
            self._flush(Finish(FinishReason.LENGTH), (token,), text)
        else:
            self.stream.push(text, (token,))

    def end(self, finish: Finish, token_ids: SequenceOf[int] = (), text: str = "") -> None:
        """Ends the stream, with the text that was held back; ``text`` comes behind it."""
        if text:
            text, _ = self.stop_strings.feed(text, check=False)
        self._flush(finish, token_ids, text)

    def _text_of(self, token: int) -> str:
        text = self.detokenizer.feed(token)
        self.text_length += len(text)
        return text

    def _open(self) -> None:
        """What comes before the first output: the prompt, as far as it was asked for."""
        prompt = self.sequence.tokens[: self.sequence.num_prompt].tolist()
        logprobs = self.sequence.sampling.prompt_logprobs
        if not (self.options.echo or logprobs is not None):
            return
        assert self.tokenizer is not None
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=self.options.skip_special_tokens
        )
        texts, offsets = [], [0]
        for token in prompt:
            texts.append(detokenizer.feed(token))
            offsets.append(offsets[-1] + len(texts[-1]))
        if logprobs is not None:
            self.stream.tell((), _prompt_logprobs(self.sequence, prompt, offsets))
        if self.options.echo:
            text = "".join(texts) + detokenizer.flush()
            self.text_length = len(text)
            self.stream.push(text, prompt)

    def _flush(self, finish: Finish, token_ids: SequenceOf[int], text: str) -> None:
        """An unfinished character may complete a stop string even here."""
        more, stop_str = self.stop_strings.feed(
            self.detokenizer.flush(), check=self.sequence.num_output > self.stop.min_tokens
        )
        text += more
        if stop_str is None:
            text += self.stop_strings.flush()
        elif finish.reason is not FinishReason.ABORT:
            finish = Finish(FinishReason.STOP, stop_str=stop_str)
        self.finish = finish
        self.stream.push(text, token_ids, finish)


def _prompt_logprobs(
    sequence: Sequence, prompt: list[int], offsets: list[int]
) -> list[TokenLogprobs]:
    """Of every token of the prompt; nothing foretells its first."""
    unknown = TokenLogprobs(0, None, 0, ())
    known = sequence.prompt_logprobs
    return [
        known.get(position, unknown)._replace(token_id=token, text_offset=offsets[position])
        for position, token in enumerate(prompt)
    ]
