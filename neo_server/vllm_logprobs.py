"""Log-probabilities as the gateway's protocol has them (protos/vllm_engine.proto)."""

from __future__ import annotations

from collections.abc import Sequence

from neo_server.sampling import TokenLogprobs
from protos import vllm_engine_pb2 as pb


def of_output(entries: Sequence[TokenLogprobs]) -> pb.OutputLogProbs:
    """Of an output's tokens."""
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob or 0.0 for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=map(_top, entries),
    )


def of_input(entries: Sequence[TokenLogprobs]) -> pb.InputLogProbs:
    """Of a prompt's tokens; the first has none."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=entry.logprob) for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=map(_top, entries),
    )


def _top(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[own for _, own in entry.top], token_ids=[token for token, _ in entry.top]
    )
