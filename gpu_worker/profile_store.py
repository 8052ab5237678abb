"""Where profiles are kept: under a key of all that one depends on; of another key none is used."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from protos.config import EngineConfig

logger = logging.getLogger(__name__)

# Of what a table's figures mean. 1: CPU attention with all of a hand-off in it. 2: products of
# zeros, which some devices are faster at. 3: without what CPU prefills store and fetch. 4: with the
# wait for tasks of one token in the hand-off, not in CPU attention.
REVISION = 5


def cpu_name() -> str:
    """The processor's model name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def profile_key(
    config: EngineConfig, device: str, world_size: int, threads: int, *, offloads: bool
) -> dict[str, Any]:
    """What a table holds for. ``offloads``: there may be CPU-requests."""
    raw = (Path(config.model_path) / "config.json").read_bytes()
    return {
        "revision": REVISION,
        "model": hashlib.sha256(raw).hexdigest()[:16],
        "gpu": device,
        "cpu": cpu_name(),
        "torch_threads": torch.get_num_threads(),
        "cpu_attn_threads": threads,
        "tp": world_size,
        "dtype": config.worker.dtype.value,
        "kv_dtype": config.cache.cpu_kv_cache_dtype.value,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "ride_capacity": config.scheduler.ride_capacity,
        "offloads": offloads,
    }


def profile_path(key: dict[str, Any], folder: str | None) -> Path:
    """Where the table of ``key`` is kept: below ``folder`` or the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = Path(folder) if folder else Path(cache) / "neo" / "profiles"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return base / f"{digest}.json"


def load_or_profile(key: dict[str, Any], folder: str | None, measure: Callable[[], Any]) -> str:
    """The stored table of ``key`` as JSON, or a new one, which is stored if it is whole."""
    path = profile_path(key, folder)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.get("key") == key:
            return json.dumps(stored)
        logger.warning("%s is of another key; it is not used", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
    measured = measure()
    table = json.dumps({"key": key, **measured})
    if key["cpu_attn_threads"] and measured.get("cpu_attn") is None:
        return table  # the next start may find workers that do their part
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(table, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        logger.warning("the profile is not stored: %s", error)
    return table
