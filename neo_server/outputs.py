"""What comes back, for every client of the engine: in-process and over gRPC."""

from __future__ import annotations

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
class Delta:
    """What has come since the one before; the last of a sequence has ``finished``."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One whole sequence."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished

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
class Collector:
    """From the messages of one ``Generate`` to deltas, and to the whole."""

    request_id: str = ""
    _text: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _finished: Finished | None = None

    def add(self, message: pb.GenerateResponse) -> Delta | None:
        """``None`` where the message says nothing of the output."""
        self.request_id = message.request_id
        if message.HasField("finish_info"):
            self._finished = finished_of(message.finish_info)
            return Delta(finished=self._finished)
        if not message.HasField("delta"):
            return None
        self._text.append(message.delta.text)
        self._token_ids.extend(message.delta.token_ids)
        return Delta(message.delta.text, tuple(message.delta.token_ids))

    def whole(self) -> RequestOutput:
        """After the last message."""
        assert self._finished is not None, "a stream without an error ends with finish_info"
        output = CompletionOutput("".join(self._text), tuple(self._token_ids), self._finished)
        return RequestOutput(self.request_id, (output,))


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
