"""From the command line to a checked configuration, with a reason for every choice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from pydantic import ValidationError

from neo_server.errors import ConfigurationError
from protos.config import CacheConfig, DType, EngineConfig, SchedulerConfig, WorkerConfig
from protos.model_config import ModelConfig, UnsupportedModelError

Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
_DEFAULT_BUDGET = 2048  # tokens of an iteration
_DEFAULT_SEQS = 256
_CUDA_SPIN_US = 200


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``neo serve``; ``None`` and ``auto`` are for ``resolve`` to choose."""

    model: str
    host: str = "127.0.0.1"
    port: int = 50051
    control_host: str = "127.0.0.1"
    control_port: int = 0
    address_file: Path | None = None
    served_model_name: str | None = None
    shutdown_timeout: float = 30.0
    max_waiting: int = 4096
    spawn_gpu_worker: bool = True
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "neo"
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_offloading_size: float = 1.0
    cpu_kv_page_size: int = 64
    shm_dir: Path | None = None
    dtype: str = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    cpu_attn_workers: int = 2
    cpu_attn_threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """A complete configuration."""

    config: EngineConfig
    model: ModelConfig
    reasons: dict[str, str] = field(default_factory=dict)  # of what was not given


def has_cuda_device() -> bool:
    """Whether the driver shows a GPU. The server itself loads no CUDA library."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def resolve(options: Options, has_cuda: Callable[[], bool] = has_cuda_device) -> Resolved:
    """Chooses what was left open. Raises ``ConfigurationError`` with field, value and limit."""
    path = model_directory(options.model)
    try:
        model = ModelConfig.from_pretrained(path)
        reasons: dict[str, str] = {}
        worker = _worker_config(options, model, has_cuda, reasons)
        scheduler = _scheduler_config(options, model, reasons)
        cache = CacheConfig(
            block_size=options.block_size,
            num_gpu_blocks_override=options.num_gpu_blocks_override,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_offloading_size=options.kv_offloading_size,
            cpu_kv_page_size=options.cpu_kv_page_size,
            shm_dir=None if options.shm_dir is None else str(options.shm_dir),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{where} is {first['input']!r}: {first['msg']}") from error
    except (UnsupportedModelError, FileNotFoundError) as error:
        raise ConfigurationError(f"model {options.model}: {error}") from error
    config = EngineConfig(model_path=str(path), cache=cache, scheduler=scheduler, worker=worker)
    return Resolved(config, model, reasons)


def model_directory(model: str) -> Path:
    """A local directory as it is; anything else is a hub id, which is downloaded."""
    local = Path(model)
    if local.is_dir():
        return local.resolve()
    if local.is_absolute() or model.startswith("."):
        raise ConfigurationError(f"model is {model!r}; there is no such directory")
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:
        raise ConfigurationError(
            f"model is {model!r}: no such directory, and the hub says: {error}"
        ) from error


def _worker_config(
    options: Options, model: ModelConfig, has_cuda: Callable[[], bool], reasons: dict[str, str]
) -> WorkerConfig:
    device = options.device
    if device == "auto":
        device = "cuda" if has_cuda() else "cpu"
        reasons["device"] = "a CUDA device is there" if device == "cuda" else "no CUDA device"
    if options.dtype == "auto":
        dtype = DType.FLOAT32 if device == "cpu" else model.dtype
        reasons["dtype"] = "device is cpu" if device == "cpu" else "the checkpoint's"
    else:
        dtype = DType(options.dtype)
    return WorkerConfig(
        device=device,
        dtype=dtype,
        load_format=options.load_format,
        seed=options.seed,
        torch_threads=_torch_threads(options, device),
        cpu_attn_workers=options.cpu_attn_workers,
        cpu_attn_threads=options.cpu_attn_threads,
        spin_us=_CUDA_SPIN_US if device == "cuda" else 0,
    )


def _torch_threads(options: Options, device: str) -> int:
    """On the CPU, PyTorch gets the cores that the attention workers leave; 0: its own choice."""
    if device == "cuda":
        return 0
    workers = options.cpu_attn_workers * options.cpu_attn_threads
    return max(1, len(os.sched_getaffinity(0)) - workers)


def _scheduler_config(
    options: Options, model: ModelConfig, reasons: dict[str, str]
) -> SchedulerConfig:
    max_model_len = options.max_model_len
    if max_model_len is None:
        max_model_len = model.max_position_embeddings
        reasons["max_model_len"] = "the model's max_position_embeddings"
    budget = options.max_num_batched_tokens
    if budget is None:
        budget = _DEFAULT_BUDGET
        reasons["max_num_batched_tokens"] = "default"
        if not options.enable_chunked_prefill:
            budget = max(budget, max_model_len)
            reasons["max_num_batched_tokens"] = "whole prompts, no chunks"
    seqs = options.max_num_seqs
    if seqs is None:
        seqs = min(_DEFAULT_SEQS, budget)
        reasons["max_num_seqs"] = "default, or max_num_batched_tokens if less"
    return SchedulerConfig(
        scheduling_policy=options.scheduling_policy,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=options.enable_chunked_prefill,
    )
