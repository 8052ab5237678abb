"""The terminal client behind ``neo generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from neo_server.chat_template import ChatTemplate
from neo_server.errors import ConfigurationError
from neo_server.tokenizer import Tokenizer
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc


@dataclass(frozen=True, slots=True)
class Sampling:
    """Flags of ``neo generate``; ``None`` leaves the server's default."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def request(self) -> pb.GenerateRequest:
        """A request without a prompt."""
        request = pb.GenerateRequest()
        for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
            value = getattr(self, name)
            if value is not None:
                setattr(request.sampling_params, name, value)
        conditions = request.stop_conditions
        if self.max_tokens is not None:
            conditions.max_tokens = self.max_tokens
        conditions.min_tokens = self.min_tokens
        conditions.stop.extend(self.stop)
        conditions.ignore_eos = self.ignore_eos
        return request


def run_client(
    server: str,
    prompts: Sequence[str],
    sampling: Sampling,
    model: Path | None,
    *,
    chat: bool,
    api_key: str | None = None,
) -> None:
    """Streams each prompt's completion to stdout, one after the other."""
    if chat and model is None:
        raise ConfigurationError("--chat needs --model DIR: the template is applied by the client")
    with grpc.insecure_channel(server) as channel:
        stub = rpc.InferenceStub(channel)
        metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        for prompt in prompts:
            request = sampling.request()
            if model is None:
                request.text = prompt
            else:
                request.token_ids.ids.extend(chat_tokens(model, prompt))
            for message in stub.Generate(request, metadata=metadata):
                sys.stdout.write(message.delta.text)
                sys.stdout.flush()
            sys.stdout.write("\n")


def chat_tokens(model: Path, user: str) -> list[int]:
    """One user turn in the model's template."""
    template = ChatTemplate.from_pretrained(model)
    if template is None:
        raise ConfigurationError(f"{model} has no chat template")
    text = template.render([{"role": "user", "content": user}])
    return Tokenizer.from_pretrained(model).encode_chat(text)
