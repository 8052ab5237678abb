"""Tiny random Llama checkpoints, made with transformers on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# What distinguishes each family, at a size that loads in milliseconds.
STYLES: dict[str, dict[str, Any]] = {
    "llama2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama3.1": {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": False,
    },
    "llama3.2": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,  # not hidden_size / heads
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
}


def make_checkpoint(
    folder: Path,
    style: str = "llama3",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Writes a checkpoint of one of ``STYLES`` into ``folder``; returns the transformers model.

    Weights are larger than the usual initialisation, so that attention is not nearly uniform and
    next tokens are far apart.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(fields | STYLES[style] | overrides)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def make_reference(
    folder: Path, style: str, sequences: int, length: int
) -> tuple[list[list[int]], Tensor]:
    """A checkpoint in ``folder``; random tokens, and the logits that transformers gives them."""
    model = make_checkpoint(folder, style)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, model.config.vocab_size, (sequences, length), generator=generator)
    with torch.no_grad():
        return tokens.tolist(), model(tokens).logits
