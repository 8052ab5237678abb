"""What comes back, for every client of the engine: in-process and over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from protos import inference_pb2 as pb

FinishReason = Literal["stop", "length", "abort"]
_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a sequence ended, and where its decode attention ran."""

    reason: FinishReason
    stop_reason: int | str | None  # the stop token or stop string, if any
    num_prompt_tokens: int
    num_output_tokens: int
    num_gpu_decodes: int  # decode steps
    num_cpu_decodes: int
    num_preemptions: int

    @property
    def placement(self) -> str:
        """In words, for people."""
        if self.num_gpu_decodes and self.num_cpu_decodes:
            return f"GPU and CPU ({self.num_gpu_decodes} + {self.num_cpu_decodes} steps)"
        return "CPU-request" if self.num_cpu_decodes else "GPU-request"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token, by the model alone: without temperature, penalties and biases."""

    token_id: int
    logprob: float | None  # None: a prompt's first token, which nothing foretells
    rank: int  # 1: the likeliest; 0 for None
    top: dict[int, float]  # of the likeliest tokens, the likeliest first


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come since the one before; the last of a sequence has ``finished``."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    index: int = 0  # of the completion, below ``n``
    logprobs: tuple[Logprob, ...] = ()  # of each token, where they are asked for


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One whole sequence."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    index: int = 0
    logprobs: tuple[Logprob, ...] = ()

    @property
    def finish_reason(self) -> FinishReason:
        """See ``Finished``."""
        return self.finished.reason

    @property
    def stop_reason(self) -> int | str | None:
        """See ``Finished``."""
        return self.finished.stop_reason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's answer."""

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[Logprob, ...] = ()

    @property
    def text(self) -> str:
        """The first sequence's."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sequence's."""
        return self.outputs[0].token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt as the model got it."""
        return self.outputs[0].finished.num_prompt_tokens


@dataclass(slots=True)
class _Sequence:
    """One completion so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finished: Finished | None = None


@dataclass(slots=True)
class Collector:
    """From the messages of one ``Generate`` to deltas, and to the whole."""

    request_id: str = ""
    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _prompt_logprobs: tuple[Logprob, ...] = ()

    def add(self, message: pb.GenerateResponse) -> Delta | None:
        """``None`` where the message says nothing of the output."""
        self.request_id = message.request_id
        event, index = message.WhichOneof("event"), message.index
        if event == "prompt_logprobs":
            self._prompt_logprobs = tuple(map(logprob_of, message.prompt_logprobs.tokens))
        if event not in ("finish_info", "delta"):
            return None
        sequence = self._sequences.setdefault(index, _Sequence())
        if event == "finish_info":
            sequence.finished = finished_of(message.finish_info)
            return Delta(finished=sequence.finished, index=index)
        delta = message.delta
        logprobs = tuple(map(logprob_of, delta.logprobs))
        sequence.text.append(delta.text)
        sequence.token_ids.extend(delta.token_ids)
        sequence.logprobs.extend(logprobs)
        return Delta(delta.text, tuple(delta.token_ids), index=index, logprobs=logprobs)

    def whole(self) -> RequestOutput:
        """After the last message."""
        outputs = tuple(_output(index, one) for index, one in sorted(self._sequences.items()))
        return RequestOutput(self.request_id, outputs, self._prompt_logprobs)


async def whole_of(messages: AsyncGenerator[pb.GenerateResponse]) -> RequestOutput:
    """The answer when it is complete."""
    collector = Collector()
    async with aclosing(messages):
        async for message in messages:
            collector.add(message)
    return collector.whole()


async def deltas_of(messages: AsyncGenerator[pb.GenerateResponse]) -> AsyncGenerator[Delta]:
    """The answer as it comes. Closing it closes ``messages``."""
    collector = Collector()
    async with aclosing(messages):
        async for message in messages:
            if (delta := collector.add(message)) is not None:
                yield delta


def _output(index: int, one: _Sequence) -> CompletionOutput:
    assert one.finished is not None, "a stream without an error ends with finish_info"
    text, ids = "".join(one.text), tuple(one.token_ids)
    return CompletionOutput(text, ids, one.finished, index, tuple(one.logprobs))


def logprob_of(message: pb.TokenLogprobs) -> Logprob:
    """The message as a plain object."""
    own = message.logprob if message.HasField("logprob") else None
    top = {one.token_id: one.logprob for one in message.top}
    return Logprob(message.token_id, own, message.rank, top)


def finished_of(info: pb.FinishInfo) -> Finished:
    """The message as a plain object."""
    kind = info.WhichOneof("stop")
    return Finished(
        reason=_REASONS[info.reason],
        stop_reason=None if kind is None else getattr(info, kind),
        num_prompt_tokens=info.num_prompt_tokens,
        num_output_tokens=info.num_output_tokens,
        num_gpu_decodes=info.num_gpu_decodes,
        num_cpu_decodes=info.num_cpu_decodes,
        num_preemptions=info.num_preemptions,
    )
