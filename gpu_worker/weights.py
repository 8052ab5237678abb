"""Loads a Llama checkpoint (safetensors, one file or sharded) into fused weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.errors import CheckpointError
from gpu_worker.progress import progress
from protos.config import DType
from protos.model_config import ModelConfig

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DUMMY_STD = 0.02  # the usual initializer_range of Llama configurations


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Linear weights are [out, in]; fused ones lie one below the other."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 * kv_size, hidden]
    o: Tensor  # [hidden, q_size]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class LlamaWeights:
    """All weights; ``head`` is ``embedding`` itself where the checkpoint ties them."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Uninitialised weights of the right shapes."""

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    embedding = make(config.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            input_norm=make(hidden),
            qkv=make(config.q_size + 2 * config.kv_size, hidden),
            o=make(hidden, config.q_size),
            post_norm=make(hidden),
            gate_up=make(2 * inner, hidden),
            down=make(hidden, inner),
        )
        for _ in range(config.num_hidden_layers)
    )
    head = embedding if config.tie_word_embeddings else make(config.vocab_size, hidden)
    return LlamaWeights(embedding=embedding, layers=layers, norm=make(hidden), head=head)


def destinations(weights: LlamaWeights, config: ModelConfig) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the part of the fused weights that it fills."""
    q, kv, inner = config.q_size, config.kv_size, config.intermediate_size
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        views["lm_head.weight"] = weights.head
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}"
        views[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        views[f"{prefix}.self_attn.q_proj.weight"] = layer.qkv[:q]
        views[f"{prefix}.self_attn.k_proj.weight"] = layer.qkv[q : q + kv]
        views[f"{prefix}.self_attn.v_proj.weight"] = layer.qkv[q + kv :]
        views[f"{prefix}.self_attn.o_proj.weight"] = layer.o
        views[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
        views[f"{prefix}.mlp.gate_proj.weight"] = layer.gate_up[:inner]
        views[f"{prefix}.mlp.up_proj.weight"] = layer.gate_up[inner:]
        views[f"{prefix}.mlp.down_proj.weight"] = layer.down
    return views


def load_weights(
    path: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """Reads the checkpoint in ``path``, tensor by tensor, converting to ``dtype``.

    Raises ``CheckpointError`` that names every missing or unexpected tensor, or the first one of
    a wrong shape or type.
    """
    weights = empty_weights(config, dtype, device)
    wanted = destinations(weights, config)
    unexpected = []
    with progress("loading weights", len(wanted)) as advance:
        for name, tensor in _tensors(Path(path)):
            destination = wanted.pop(name, None)
            if destination is not None:
                _fill(name, tensor, destination)
                advance()
            elif not _is_redundant(name, config):
                unexpected.append(name)
    if wanted:
        raise CheckpointError(f"{path}: missing tensors: {_names(list(wanted))}")
    if unexpected:
        raise CheckpointError(f"{path}: unexpected tensors: {_names(unexpected)}")
    return weights


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> LlamaWeights:
    """Random weights, the same for the same seed and kind of device; norms are ones."""
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for view in destinations(weights, config).values():
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, DUMMY_STD, generator=generator)
    return weights


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoint's files, sorted: those that the index names, or the single one."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return [folder / SINGLE_FILE]
    weight_map = json.loads(index_path.read_text(encoding="utf-8")).get("weight_map")
    if not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    if absent := [file.name for file in files if not file.exists()]:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names missing files: {_names(absent)}")
    return files


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in checkpoint_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118  (not a dict)
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {error}") from error


def _fill(name: str, tensor: Tensor, destination: Tensor) -> None:
    if tensor.shape != destination.shape:
        raise CheckpointError(
            f"{name}: shape is {list(tensor.shape)}, expected {list(destination.shape)}"
        )
    if tensor.dtype not in TORCH_DTYPES.values():
        supported = ", ".join(kind.value for kind in TORCH_DTYPES)
        raise CheckpointError(f"{name}: dtype is {tensor.dtype}; supported are {supported}")
    destination.copy_(tensor)
    narrowed = destination.dtype is torch.float16 and tensor.dtype is not torch.float16
    if narrowed and not torch.isfinite(destination).all():
        raise CheckpointError(f"{name}: does not fit into float16 (use bfloat16 or float32)")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Older checkpoints carry tensors that follow from the rest."""
    tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return tied_head or name.endswith(".rotary_emb.inv_freq")


def _names(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(sorted(names)[:limit]) + rest
