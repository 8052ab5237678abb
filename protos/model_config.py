"""The part of a Hugging Face ``config.json`` that a Llama-family model needs, checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from protos.config import DType


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something this project does not implement; the message names it."""


class RopeScaling(BaseModel):
    """Llama 3.1's frequency scaling (``rope_type: llama3``)."""

    model_config = ConfigDict(frozen=True)

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(BaseModel):
    """Shapes and constants of a Llama-family decoder."""

    model_config = ConfigDict(frozen=True)

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: DType
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (and of the value) projection."""
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on Q·K."""
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * itemsize

    @staticmethod
    def from_pretrained(path: str | Path) -> ModelConfig:
        """Reads ``config.json`` (and ``generation_config.json``) of a local directory.

        Raises ``UnsupportedModelError`` for what is not a plain Llama and ``FileNotFoundError``
        where there is no ``config.json``.
        """
        folder = Path(path)
        raw = _read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return parse_model_config(raw, generation)


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def parse_model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Checks a parsed ``config.json`` and ``generation_config.json``."""
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if "LlamaForCausalLM" not in architectures:
        raise UnsupportedModelError(
            f"architectures is {architectures}; supported is LlamaForCausalLM"
        )
    _refuse_unless(raw, "hidden_act", "silu")
    _refuse_unless(raw, "attention_bias", False)
    _refuse_unless(raw, "mlp_bias", False)
    heads = int(raw["num_attention_heads"])
    rope = _rope_parameters(raw)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope, raw),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dtype=DType(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_eos_ids(raw, generation),
    )


def _refuse_unless(raw: dict[str, Any], key: str, wanted: object) -> None:
    if raw.get(key, wanted) != wanted:
        raise UnsupportedModelError(f"{key} is {raw[key]!r}; supported is {wanted!r}")


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """One dictionary from either spelling: ``rope_parameters``, or ``rope_theta`` + scaling."""
    merged: dict[str, Any] = {}
    if raw.get("rope_theta") is not None:
        merged["rope_theta"] = raw["rope_theta"]
    merged.update(raw.get("rope_scaling") or {})
    merged.update(raw.get("rope_parameters") or {})
    return merged


def _rope_scaling(rope: dict[str, Any], raw: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope_scaling type is {kind!r}; supported is 'llama3'")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope.get("original_max_position_embeddings")
        or raw["max_position_embeddings"],
    )


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Every end-of-sequence id that either file names, in order, once."""
    found: dict[int, None] = {}
    for source in (generation, raw):
        ids = source.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)
