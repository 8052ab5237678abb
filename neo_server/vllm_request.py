"""From a gateway's request (protos/vllm_engine.proto) to one of protos/inference.proto.

The one place that knows what the fields of the former mean here. A field that the engine does not
have is refused by its name, never dropped.
"""

from __future__ import annotations

from neo_server.errors import InvalidRequestError
from protos import inference_pb2 as pb
from protos import vllm_engine_pb2 as vllm

_MAX_TOP_K = 2**31 - 1
_SEEDS = 2**64  # a negative seed is another one than its absolute value


def generate_request(message: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Raises ``InvalidRequestError`` for what this server does not do; values are checked later."""
    params = message.sampling_params
    _refuse_what_is_lacking(message)
    request = pb.GenerateRequest(
        request_id=message.request_id,
        sampling_params=_sampling(params),
        stop_conditions=pb.StopConditions(
            min_tokens=params.min_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
            ignore_eos=params.ignore_eos,
        ),
        response_options=_told(params),
    )
    if params.HasField("truncate_prompt_tokens"):
        request.truncate_prompt_tokens = params.truncate_prompt_tokens
    if params.HasField("max_tokens"):
        request.stop_conditions.max_tokens = params.max_tokens
    kind = message.WhichOneof("input")
    if kind == "tokenized":
        request.token_ids.ids.extend(message.tokenized.input_ids)
    elif kind == "text":
        request.text = message.text
    else:
        raise InvalidRequestError("input is unset; it must be tokenized or text", "input")
    return request


def _sampling(params: vllm.SamplingParams) -> pb.SamplingParams:
    if params.top_k > _MAX_TOP_K:
        raise InvalidRequestError(
            f"top_k is {params.top_k}; it must be <= {_MAX_TOP_K} (0: all)", "top_k"
        )
    sampling = pb.SamplingParams(top_k=params.top_k, min_p=params.min_p)
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.top_p != 0.0:
        sampling.top_p = params.top_p
    if params.HasField("seed"):
        sampling.seed = params.seed % _SEEDS
    for name in ("n", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (value := getattr(params, name)) != 0:
            setattr(sampling, name, value)
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise InvalidRequestError(
                f"logit_bias token id is {token}; it must be >= 0", "logit_bias"
            )
        sampling.logit_bias[token] = bias
    return sampling


def _told(params: vllm.SamplingParams) -> pb.ResponseOptions:
    """Answers have no text, so special tokens count for stop strings only."""
    options = pb.ResponseOptions(skip_special_tokens=params.skip_special_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        if not params.HasField(name):
            continue
        value = getattr(params, name)
        if value < 0:
            raise InvalidRequestError(f"{name} is {value}; it must be >= 0", name)
        setattr(options, name, value)
    return options


def _refuse_what_is_lacking(message: vllm.GenerateRequest) -> None:
    params = message.sampling_params
    constraint = params.WhichOneof("constraint")
    if constraint is not None and getattr(params, constraint) is not False:
        _refuse(constraint, getattr(params, constraint))
    for name in ("mm_inputs", "kv_transfer_params", "kv_transfer_params_json"):
        if message.HasField(name):
            _refuse(name, getattr(message, name))
    if message.data_parallel_rank != 0:
        raise InvalidRequestError(
            f"data_parallel_rank is {message.data_parallel_rank}; this server has rank 0 only",
            "data_parallel_rank",
        )


def _refuse(name: str, value: object) -> None:
    shown = " ".join(str(value).split())
    raise InvalidRequestError(f"{name} is {shown:.100}; this server does not support it", name)
