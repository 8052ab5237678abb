"""Flags of the commands that use a running server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import grpc
from typer import Argument, Option

from neo_server.client import DEFAULT_SERVER, Client
from neo_server.params import SamplingParams

_SAMPLING, _STOPPING = "How tokens are drawn", "When an answer is over"


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Which server, and the key to it."""

    server: Annotated[str, Option(help="HOST:PORT of its gRPC service.")] = DEFAULT_SERVER
    api_key: Annotated[
        str | None, Option(envvar="NEO_API_KEY", help="The server's, where it has one.")
    ] = field(default=None, repr=False)
    ssl_ca_certs: Annotated[
        Path | None,
        Option(help="PEM; the server has TLS.", exists=True, dir_okay=False),
    ] = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of a channel; ``None``: it is not encrypted."""
        if self.ssl_ca_certs is None:
            return None
        return grpc.ssl_channel_credentials(self.ssl_ca_certs.read_bytes())

    def client(self, timeout_s: float | None = None) -> Client:
        """See ``Client``."""
        return Client(
            self.server,
            api_key=self.api_key,
            timeout_s=timeout_s,
            credentials=self.credentials(),
        )


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Fields of ``SamplingParams`` that are easily said on a command line."""

    temperature: Annotated[
        float | None,
        Option(help="0: greedy. Default: 1, by the server.", rich_help_panel=_SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        Option(help="Of the most likely tokens, up to this sum.", rich_help_panel=_SAMPLING),
    ] = None
    top_k: Annotated[
        int | None, Option(help="Of that many most likely tokens.", rich_help_panel=_SAMPLING)
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            help="Of tokens at least this share as likely as the likeliest.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(help="The same seed, the same answer.", rich_help_panel=_SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Option(help="Of tokens that the answer has.", rich_help_panel=_SAMPLING),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Option(help="For each time that it has them.", rich_help_panel=_SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(help="Above 1: of tokens of prompt or answer.", rich_help_panel=_SAMPLING),
    ] = None
    max_tokens: Annotated[
        int | None, Option(help="Default: as many as fit.", rich_help_panel=_STOPPING)
    ] = None
    min_tokens: Annotated[
        int | None, Option(help="Nothing stops before.", rich_help_panel=_STOPPING)
    ] = None
    stop: Annotated[
        list[str] | None,
        Option(help="Ends the answer; may be repeated.", rich_help_panel=_STOPPING),
    ] = None
    ignore_eos: Annotated[
        bool,
        Option("--ignore-eos", help="Go on after end of sequence.", rich_help_panel=_STOPPING),
    ] = False

    def params(self) -> SamplingParams:
        """As a request has them."""
        return SamplingParams(**asdict(self))


@dataclass(frozen=True, slots=True)
class GenerateFlags:
    """Of ``neo generate`` alone."""

    prompt: Annotated[list[str], Argument(help="Prompts; '-' reads one from stdin.")]
    chat: Annotated[
        bool, Option("--chat", help="Each is a user's message, in the model's chat template.")
    ] = False


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """Of ``neo chat`` alone."""

    system: Annotated[str | None, Option(help="What the conversation begins with.")] = None


@dataclass(frozen=True, slots=True)
class TopFlags:
    """Of ``neo top`` alone."""

    interval: Annotated[float, Option(help="Seconds between two looks.", min=0.05)] = 1.0
    once: Annotated[bool, Option("--once", help="One view, after one interval.")] = False
