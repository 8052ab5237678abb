"""The least time that a batch can take on a device of measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from neo_server.bench.device_rates import Rates
from neo_server.roofline import ModelShape
from protos.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes that must be read, arithmetic that must be done, and the time of the larger."""

    weight_bytes: int
    kv_bytes: int
    flops: int
    seconds: float


def shape_of(model: ModelConfig, itemsize: int) -> ModelShape:
    """What the arithmetic below needs of a model; ``itemsize`` of weights and GPU-cache."""
    return ModelShape(
        name=model.architecture,
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab=model.vocab_size,
        itemsize=itemsize,
    )


def decode_floor(shape: ModelShape, rates: Rates, batch: int, context: int) -> Floor:
    """One decode iteration of ``batch`` sequences of ``context`` tokens in the cache each."""
    kv = batch * context * shape.layers * shape.kv_bytes
    flops = _linear_flops(shape, batch, batch) + _attention_flops(shape, batch * context)
    return _floor(shape, rates, kv, flops)


def prefill_floor(shape: ModelShape, rates: Rates, batch: int, length: int) -> Floor:
    """The first iteration of ``batch`` prompts of ``length`` tokens, in one go.

    Weights are read once; K and V need not be read from memory at all.
    """
    pairs = batch * length * (length + 1) // 2
    flops = _linear_flops(shape, batch * length, batch) + _attention_flops(shape, pairs)
    return _floor(shape, rates, 0, flops)


def _floor(shape: ModelShape, rates: Rates, kv_bytes: int, flops: int) -> Floor:
    # Of the embedding only the rows of the batch's tokens are read; the head is read whole.
    head = shape.vocab * shape.hidden
    weights = (shape.layers * shape.layer_parameters + head) * shape.itemsize
    seconds = max((weights + kv_bytes) / rates.bytes_per_s, flops / rates.flops)
    return Floor(weights, kv_bytes, flops, seconds)


def _linear_flops(shape: ModelShape, tokens: int, sampled: int) -> int:
    head = shape.vocab * shape.hidden * sampled
    return 2 * (shape.layers * shape.layer_parameters * tokens + head)


def _attention_flops(shape: ModelShape, pairs: int) -> int:
    return 4 * pairs * shape.heads * shape.head_dim * shape.layers
