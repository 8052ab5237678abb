"""Checks that the shared segments were made for the model that this worker loads."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from gpu_worker.errors import GeometryError
from neo_native import WireDType
from protos.config import EngineConfig
from protos.model_config import ModelConfig

Array = npt.NDArray[Any]


def check_geometry(geometry: Array, model: ModelConfig, config: EngineConfig, rank: int) -> None:
    """Raises ``GeometryError`` unless the segments were made for this model and configuration."""
    kv_dtype = config.cache.cpu_kv_cache_dtype.resolve(config.worker.dtype)
    expected = {
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "act_dtype": WireDType[config.worker.dtype.name],
        "kv_dtype": WireDType[kv_dtype.name],
        "block_size": config.cache.block_size,
        "rank": rank,
    }
    for field, value in expected.items():
        if int(geometry[field]) != value:
            found = int(geometry[field])
            raise GeometryError(
                f"{field} is {found} in the segments, {value} for {config.model_path}"
            )
