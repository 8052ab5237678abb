"""Full names of the public gRPC services that have a health status of their own."""

from __future__ import annotations

from protos import inference_pb2, vllm_engine_pb2

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name,
)
