"""protos/vllm_engine.proto is the gateway's own on the wire."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos import vllm_engine_pb2 as pb

# As in lightseekorg/smg, crates/grpc_client/proto/vllm_engine.proto: name, number, type; "?":
# presence is explicit, "*": repeated.
FIELDS = {
    "GenerateRequest": "request_id 1 string, tokenized 2 message?, text 3 string?, "
    "sampling_params 4 message?, stream 5 bool, kv_transfer_params 6 message?, "
    "mm_inputs 7 message?, kv_transfer_params_json 8 string?, data_parallel_rank 9 int32?",
    "TokenizedInput": "original_text 1 string, input_ids 2 uint32*",
    "SamplingParams": "temperature 1 float?, top_p 2 float, top_k 3 uint32, min_p 4 float, "
    "frequency_penalty 5 float, presence_penalty 6 float, repetition_penalty 7 float, "
    "max_tokens 8 uint32?, min_tokens 9 uint32, stop 10 string*, stop_token_ids 11 uint32*, "
    "skip_special_tokens 12 bool, spaces_between_special_tokens 13 bool, ignore_eos 14 bool, "
    "n 15 uint32, json_schema 16 string?, regex 17 string?, grammar 18 string?, "
    "structural_tag 19 string?, json_object 20 bool?, choice 21 message?, logprobs 22 int32?, "
    "prompt_logprobs 23 int32?, seed 24 int32?, include_stop_str_in_output 25 bool, "
    "logit_bias 26 message*, truncate_prompt_tokens 27 int32?",
    "ChoiceConstraint": "choices 1 string*",
    "KvTransferParams": "remote_host 1 string, remote_port 2 uint32",
    "OutputLogProbs": "token_logprobs 1 float*, token_ids 2 uint32*, top_logprobs 3 message*",
    "InputLogProbs": "token_logprobs 1 message*, token_ids 2 uint32*, top_logprobs 3 message*",
    "InputTokenLogProb": "value 1 float?",
    "TopLogProbs": "values 1 float*, token_ids 2 uint32*",
    "GenerateResponse": "chunk 1 message?, complete 2 message?",
    "GenerateStreamChunk": "token_ids 1 uint32*, prompt_tokens 2 uint32, "
    "completion_tokens 3 uint32, cached_tokens 4 uint32, output_logprobs 5 message?, "
    "input_logprobs 6 message?, index 7 uint32",
    "GenerateComplete": "output_ids 1 uint32*, finish_reason 2 string, prompt_tokens 3 uint32, "
    "completion_tokens 4 uint32, cached_tokens 5 uint32, output_logprobs 6 message?, "
    "input_logprobs 7 message?, index 8 uint32, kv_transfer_params 9 message?, "
    "matched_token_id 10 uint32?, matched_stop_str 11 string?, kv_transfer_params_json 12 string?",
    "HealthCheckResponse": "healthy 1 bool, message 2 string",
    "AbortRequest": "request_ids 1 string*",
    "GetModelInfoResponse": "model_path 1 string, is_generation 2 bool, "
    "max_context_length 3 uint32, vocab_size 4 uint32, supports_vision 5 bool, "
    "served_model_name 6 string, tokenizer_path 7 string, model_type 8 string, "
    "architectures 9 string*, eos_token_ids 10 int32*, pad_token_id 11 int32, "
    "bos_token_id 12 int32, max_req_input_len 13 int32, default_sampling_params_json 14 string",
    "GetServerInfoResponse": "active_requests 1 uint32, is_paused 2 bool, "
    "last_receive_timestamp 3 double, uptime_seconds 4 double, server_type 5 string, "
    "kv_connector 6 string, kv_role 7 string, kv_engine_id 8 string, data_parallel_size 9 int32, "
    "shm_namespace_id 10 string, supports_rdma_pull 11 bool",
    "GetLoadsRequest": "dp_rank 1 int32?, include 2 string*",
    "GetLoadsResponse": "timestamp 1 string, version 2 string, dp_rank_count 3 int32, "
    "loads 4 message*",
    "SchedulerLoad": "dp_rank 1 int32, num_running_reqs 2 int32, num_waiting_reqs 3 int32, "
    "num_total_reqs 4 int32, num_used_tokens 5 int32, max_total_num_tokens 6 int32, "
    "token_usage 7 double, gen_throughput 8 double, cache_hit_rate 9 double, "
    "utilization 10 double, max_running_requests 11 int32",
}
KINDS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("string", "message", "bool", "int32", "uint32", "float", "double")
}


def shape(field: Any) -> str:
    mark = "*" if field.is_repeated else "?" * field.has_presence
    return f"{field.name} {field.number} {KINDS[field.type]}{mark}"


@pytest.mark.parametrize("message", FIELDS)
def test_messages_are_those_of_the_gateway_on_the_wire(message: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields
    found = sorted(map(shape, fields), key=lambda text: int(text.split()[1]))
    assert found == FIELDS[message].split(", ")


def test_the_service_is_the_gateways() -> None:
    service = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    assert service.full_name == "vllm.grpc.engine.VllmEngine"
    streams = {method.name: method.server_streaming for method in service.methods}
    assert streams == {
        "Generate": True,
        "HealthCheck": False,
        "Abort": False,
        "GetModelInfo": False,
        "GetServerInfo": False,
        "GetLoads": False,
        "GetTokenizer": True,
    }
    assert not any(method.client_streaming for method in service.methods)
