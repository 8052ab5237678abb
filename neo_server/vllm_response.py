"""From the engine's outputs to a gateway's answers (protos/vllm_engine.proto)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from neo_server.request import Output, Request
from neo_server.sampling import TokenLogprobs
from protos import vllm_engine_pb2 as vllm


def chunk_of(served: Request, output: Output) -> vllm.GenerateResponse:
    """What is new of one completion; log-probabilities of the prompt come with the first."""
    chunk = vllm.GenerateStreamChunk(
        token_ids=output.token_ids,
        prompt_tokens=served.sequence.num_prompt,
        completion_tokens=len(output.token_ids),
        output_logprobs=_output_logprobs(output.logprobs),
        input_logprobs=_input_logprobs(output.prompt_logprobs),
        index=served.index,
    )
    return vllm.GenerateResponse(chunk=chunk)


def complete_of(
    served: Request, output: Output, own_ends: Collection[int]
) -> vllm.GenerateResponse:
    """The end of one completion, with the tokens of ``output``: all, or the last of a stream.

    ``own_ends``: tokens that end a sequence although nobody has asked for them.
    """
    assert output.finish is not None
    complete = vllm.GenerateComplete(
        output_ids=output.token_ids,
        finish_reason=output.finish.reason.name.lower(),
        prompt_tokens=served.sequence.num_prompt,
        completion_tokens=len(output.token_ids),
        output_logprobs=_output_logprobs(output.logprobs),
        input_logprobs=_input_logprobs(output.prompt_logprobs),
        index=served.index,
    )
    token = output.finish.stop_token_id
    if output.finish.stop_str is not None:
        complete.matched_stop_str = output.finish.stop_str
    elif token is not None and token not in own_ends:
        complete.matched_token_id = token
    return vllm.GenerateResponse(complete=complete)


def _output_logprobs(entries: Sequence[TokenLogprobs]) -> vllm.OutputLogProbs | None:
    if not entries:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[entry.logprob or 0.0 for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=_tops(entries),
    )


def _input_logprobs(entries: Sequence[TokenLogprobs]) -> vllm.InputLogProbs | None:
    if not entries:
        return None
    return vllm.InputLogProbs(
        token_logprobs=[vllm.InputTokenLogProb(value=entry.logprob) for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=_tops(entries),
    )


def _tops(entries: Sequence[TokenLogprobs]) -> list[vllm.TopLogProbs]:
    """One for each entry, or none where no alternatives are asked for."""
    if not any(entry.top for entry in entries):
        return []
    return [
        vllm.TopLogProbs(
            values=[logprob for _, logprob in entry.top],
            token_ids=[token for token, _ in entry.top],
        )
        for entry in entries
    ]
