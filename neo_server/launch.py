"""From the command line to a checked configuration, with a reason for every choice."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from neo_native import cores, make_geometry, segment_bytes, segments
from neo_server import architectures
from neo_server.core_plan import CorePlan, plan_cores
from neo_server.errors import ConfigurationError
from neo_server.geometry import SPARE_WORKERS, cpu_page_bytes, geometry_fields
from neo_server.host_memory import FreeMemory, Need, auto_size, free_memory
from neo_server.options import Device, LoadFormat, Options
from neo_server.plan import Mode, Place
from neo_server.policies import load_policy
from neo_server.riders import group_capacity
from neo_server.tls import Tls
from neo_server.unix_socket import socket_path
from protos.config import (
    PLAN_MODES,
    CacheConfig,
    DType,
    EngineConfig,
    KvCacheDType,
    SchedulerConfig,
    WorkerConfig,
)
from protos.model_config import ModelConfig, UnsupportedModelError

__all__ = ["Device", "LoadFormat", "Options", "Resolved", "has_cuda_device", "resolve"]

T = TypeVar("T")
_DEVICES = Path("/dev")
_DEFAULT_BUDGET = 2048  # tokens of an iteration
_DEFAULT_SEQS = 256
_DEFAULT_WORKERS = 2
_MAX_WORKERS = 496  # the worker table has at most 512 rows, some of them for workers by hand
_MAX_THREADS = 512  # of one worker
_CUDA_SPIN_US = 200


@dataclass(frozen=True, slots=True)
class Resolved:
    """A complete configuration."""

    config: EngineConfig
    model: ModelConfig
    reasons: dict[str, str] = field(default_factory=dict)  # of what was not given
    has_tokenizer: bool = True


def has_cuda_device() -> bool:
    """Whether there is a GPU that PyTorch can use. The server itself loads no CUDA library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return False
    return torch_has_cuda() and any(_DEVICES.glob("nvidia[0-9]*"))


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built with CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", version, re.MULTILINE)
    return found is not None and found[1] != "None"


def resolve(
    options: Options,
    has_cuda: Callable[[], bool] = has_cuda_device,
    free: Callable[[Path | None], FreeMemory] = free_memory,
) -> Resolved:
    """Chooses what was left open. Raises ``ConfigurationError`` with field, value and limit.

    ``free`` measures memory, given ``shm_dir``.
    """
    _check_flags(options)
    path = model_directory(options.model, options.load_format)
    model = _model_config(options.model, path)
    reasons: dict[str, str] = {}
    options = _tokenizer(_offloading(options, reasons), path, reasons)
    try:
        worker = _worker_config(options, model, has_cuda, reasons)
        scheduler = _scheduler_config(options, model, reasons)
        cache = CacheConfig(
            block_size=options.block_size,
            num_gpu_blocks_override=options.num_gpu_blocks_override,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_offloading_size=options.kv_offloading_size or 0.0,
            cpu_kv_page_size=options.cpu_kv_page_size,
            cpu_kv_cache_dtype=_kv_cache_dtype(options),
            shm_dir=None if options.shm_dir is None else str(options.shm_dir.resolve()),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{where} is {first['input']!r}: {first['msg']}") from error
    config = EngineConfig(model_path=str(path), cache=cache, scheduler=scheduler, worker=worker)
    if options.kv_offloading_size is None:
        size, why = auto_size(free(options.shm_dir), _need(config, model))
        reasons["kv_offloading_size"] = why
        cache = cache.model_copy(update={"kv_offloading_size": size})
        config = config.model_copy(update={"cache": cache})
    return Resolved(config, model, reasons, has_tokenizer=not options.skip_tokenizer_init)


def _check_flags(options: Options) -> None:
    """What no part of the configuration checks by itself."""
    for name, value, least, most in (
        ("cpu_attn_workers", options.cpu_attn_workers, 0, _MAX_WORKERS),
        ("cpu_attn_threads", options.cpu_attn_threads, 1, _MAX_THREADS),
        ("reserved_cores", options.reserved_cores, 0, math.inf),
        ("max_num_queued_reqs", options.max_num_queued_reqs, 0, math.inf),
        ("max_num_queued_tokens", options.max_num_queued_tokens, 0, math.inf),
        ("http_port", options.http_port, 0, 65535),
        ("shutdown_timeout", options.shutdown_timeout, 0, math.inf),
        ("plan_timeout", options.plan_timeout, 0, math.inf),
        ("cpu_attn_timeout", options.cpu_attn_timeout, 0.01, math.inf),
        ("log_stats_interval", options.log_stats_interval, 0, math.inf),
    ):
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be {limit}")
    for host in filter(None, (options.host, options.http_host, options.control_host)):
        socket_path(host)
    Tls.of(options)
    if options.uds is not None and (options.http_host or options.http_port is not None):
        raise ConfigurationError(
            f"--uds is {options.uds}; HTTP has one address: no --http-port, no --http-host"
        )
    if options.http_host is not None and options.http_target is None:
        raise ConfigurationError(
            f"--http-host is {options.http_host}; without --http-port there is no HTTP"
        )
    if options.api_key is not None and not (options.api_key and options.api_key.isascii()):
        raise ConfigurationError(
            "--api-key is empty or not ASCII; it must be at least one character"
        )
    if options.shm_dir is not None and not options.shm_dir.is_dir():
        raise ConfigurationError(f"--shm-dir is {options.shm_dir}; there is no such directory")
    if options.address_file is not None:
        folder = options.address_file.absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigurationError(
                f"--address-file is {options.address_file}; {folder} is no directory to write to"
            )


def _model_config(name: str, path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_pretrained(path)
    except KeyError as error:
        raise ConfigurationError(f"model {name}: config.json has no {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"model {name}: {where} of config.json is {first['input']!r}: {first['msg']}"
        ) from error
    except (UnsupportedModelError, FileNotFoundError) as error:
        raise ConfigurationError(f"model {name}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"model {name}: config.json: {error}") from error


def _offloading(options: Options, reasons: dict[str, str]) -> Options:
    """Fills in what CPU-requests need: nothing where the policy has none.

    How large the CPU-cache is, is left to ``auto_size``.
    """
    offloads = Place.CPU in load_policy(options.scheduling_policy).places
    size, workers = options.kv_offloading_size, options.cpu_attn_workers
    why = "default" if offloads else f"{options.scheduling_policy} has no CPU-requests"
    if size is None and not offloads:
        size = 0.0
        reasons["kv_offloading_size"] = why
    if workers is None:
        workers = _DEFAULT_WORKERS if offloads else 0
        reasons["cpu_attn_workers"] = why
    return replace(options, kv_offloading_size=size, cpu_attn_workers=workers)


def _need(config: EngineConfig, model: ModelConfig) -> Need:
    cache, scheduler = config.cache, config.scheduler
    fields = geometry_fields(config, model, config.worker.cpu_attn_workers + SPARE_WORKERS)
    geometry = make_geometry(**fields)
    others = [kind for name, kind in segments.KINDS.items() if name != "cpu_cache"]
    return Need(
        device=config.worker.device,
        page=cpu_page_bytes(cache, model, config.worker.dtype),
        pages=fields["max_pages"] * scheduler.max_num_seqs,
        pages_why=f"{scheduler.max_num_seqs} sequences of {scheduler.max_model_len} tokens",
        other_segments=sum(segment_bytes(geometry, kind) for kind in others),
    )


def _given(value: T | None) -> T:
    assert value is not None, "_offloading has filled it in"
    return value


def _kv_cache_dtype(options: Options) -> KvCacheDType:
    try:
        return KvCacheDType(options.cpu_kv_cache_dtype)
    except ValueError as error:
        known = ", ".join(KvCacheDType)
        raise ConfigurationError(
            f"cpu_kv_cache_dtype is {options.cpu_kv_cache_dtype!r}; known are {known}"
        ) from error


def model_directory(model: str, load_format: LoadFormat = "auto") -> Path:
    """A local directory as it is; a hub id is downloaded.

    Where weights are random, the names of ``architectures`` come before the hub's, and no weights
    are downloaded.
    """
    local = Path(model)
    if local.is_dir():
        return local.resolve()
    if local.is_absolute() or model.startswith("."):
        raise ConfigurationError(f"model is {model!r}; there is no such directory")
    dummy = load_format == "dummy"
    if dummy and (found := architectures.find(model)) is not None:
        return found
    from huggingface_hub import snapshot_download  # slow to import

    files = ["*.json", "*.jinja"] if dummy else ["*.json", "*.jinja", "*.safetensors"]
    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except Exception as error:
        names = f", none of {', '.join(architectures.known())}" if dummy else ""
        raise ConfigurationError(
            f"model is {model!r}: no such directory{names}, and the hub says: {error}"
        ) from error


def _tokenizer(options: Options, path: Path, reasons: dict[str, str]) -> Options:
    """Random weights need no tokenizer; where there is none, prompts are token ids."""
    missing = not (path / "tokenizer.json").exists()
    if options.skip_tokenizer_init or not (missing and options.load_format == "dummy"):
        return options
    reasons["skip_tokenizer_init"] = "no tokenizer.json, random weights: prompts are token ids"
    return replace(options, skip_tokenizer_init=True)


def _worker_config(
    options: Options, model: ModelConfig, has_cuda: Callable[[], bool], reasons: dict[str, str]
) -> WorkerConfig:
    device = options.device
    if device == "auto":
        device = "cuda" if has_cuda() else "cpu"
        reasons["device"] = (
            "a CUDA device is there" if device == "cuda" else "no usable CUDA device"
        )
    if options.dtype == "auto":
        dtype = DType.FLOAT32 if device == "cpu" else model.dtype
        reasons["dtype"] = "device is cpu" if device == "cpu" else "the checkpoint's"
    else:
        dtype = DType(options.dtype)
    plan = _plan_cores(options, device, reasons)
    return WorkerConfig(
        device=device,
        dtype=dtype,
        load_format=options.load_format,
        kernel_backend=options.kernel_backend,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
        torch_threads=plan.torch_threads,
        cpu_attn_workers=_given(options.cpu_attn_workers),
        cpu_attn_threads=plan.attn_threads,
        pin_cpu_attn_threads=plan.pin,
        reserved_cores=plan.reserved,
        profile=options.profile,
        profile_dir=None if options.profile_dir is None else str(options.profile_dir),
        spin_us=_CUDA_SPIN_US if device == "cuda" else 0,
        cpu_attn_timeout_s=options.cpu_attn_timeout,
    )


def _plan_cores(options: Options, device: str, reasons: dict[str, str]) -> CorePlan:
    n_cores = len(cores.usable())
    plan = plan_cores(
        n_cores,
        _given(options.cpu_attn_workers),
        options.cpu_attn_threads,
        options.reserved_cores,
        is_cuda=device == "cuda",
    )
    if options.cpu_attn_threads is None:
        reasons["cpu_attn_threads"] = f"{n_cores} usable cores, {plan.reserved} reserved"
    if options.reserved_cores is None:
        reasons["reserved_cores"] = (
            "the gpu worker's launcher and the server"
            if device == "cuda"
            else "what PyTorch gets, where cores are not scarce"
        )
    return plan


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
    modes = load_policy(options.scheduling_policy).modes
    rides = (
        options.enable_piggyback and options.kv_offloading_size != 0.0 and Mode.PIGGYBACK in modes
    )
    return SchedulerConfig(
        ride_capacity=group_capacity(model.num_hidden_layers + 1, seqs) if rides else 0,
        scheduling_policy=options.scheduling_policy,
        plan_modes=tuple(mode for mode in PLAN_MODES if mode in modes),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=options.enable_chunked_prefill,
        tpot_slo_s=None if options.tpot_slo_ms is None else options.tpot_slo_ms * 1e-3,
        ttft_slo_s=None if options.ttft_slo_ms is None else options.ttft_slo_ms * 1e-3,
        max_skipped_iterations=options.max_skipped_iterations,
        max_logprobs=options.max_logprobs,
    )
