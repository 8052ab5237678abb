"""What the server chose, and why, for people."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.table import Table

from neo_server.geometry import cpu_page_bytes, num_cpu_pages
from neo_server.launch import Options, Resolved

_log = logging.getLogger(__name__)


def print_banner(
    console: Console, options: Options, resolved: Resolved, *, offline: bool = False
) -> None:
    """One table: setting, value, reason. ``offline``: there is no public service.

    Where logs are JSON it is one line of them.
    """
    if options.log_format == "json":
        settings = {setting: value for setting, value, _ in rows(options, resolved)}
        _log.info("configuration", extra={"fields": {"configuration": settings}})
        return
    verb = "runs" if offline else "serves"
    table = Table(
        title=f"NEO {verb} {options.served_model_name or options.model}", title_style="bold"
    )
    for column in ("setting", "value", "why"):
        table.add_column(column, overflow="fold")
    chosen = rows(options, resolved)
    for setting, value, reason in chosen if offline else [*chosen, *_ports(options)]:
        table.add_row(setting, value, reason)
    console.print(table)


def rows(options: Options, resolved: Resolved) -> list[tuple[str, str, str]]:
    """The banner's lines."""
    config, model, why = resolved.config, resolved.model, resolved.reasons
    cache, scheduler, worker = config.cache, config.scheduler, config.worker
    pages = num_cpu_pages(cache, model, worker.dtype)
    page_mib = cpu_page_bytes(cache, model, worker.dtype) / 2**20
    cpu_dtype = cache.cpu_kv_cache_dtype.resolve(worker.dtype)
    return [
        ("device", worker.device, why.get("device", "as given")),
        ("dtype", worker.dtype.value, why.get("dtype", "as given")),
        *_tokenizer(resolved),
        ("scheduling policy", scheduler.scheduling_policy, ""),
        ("max_model_len", str(scheduler.max_model_len), why.get("max_model_len", "as given")),
        ("max_num_seqs", str(scheduler.max_num_seqs), why.get("max_num_seqs", "as given")),
        (
            "max_num_batched_tokens",
            str(scheduler.max_num_batched_tokens),
            why.get("max_num_batched_tokens", "as given"),
        ),
        ("GPU-cache", *_gpu_cache(options, cache.block_size)),
        (
            "CPU-cache",
            f"{pages} pages of {cache.cpu_kv_page_size} tokens, {cpu_dtype.value}; "
            f"{cache.kv_offloading_size:.4g} GiB / {page_mib:.2f} MiB",
            why.get("kv_offloading_size", "as given"),
        ),
        (
            "cpu-attention workers",
            f"{worker.cpu_attn_workers} x {worker.cpu_attn_threads} threads",
            why.get("cpu_attn_threads", "as given")
            if worker.cpu_attn_workers
            else why.get("cpu_attn_workers", "as given"),
        ),
        (
            "reserved cores",
            f"{worker.reserved_cores}, {'pinned' if worker.pin_cpu_attn_threads else 'unpinned'}",
            why.get("reserved_cores", "as given"),
        ),
    ]


def _ports(options: Options) -> list[tuple[str, str, str]]:
    target = options.http_target
    tls = "" if options.ssl_certfile is None else "TLS; "
    return [
        ("port", _shown(options.host, options.port), f"{tls}0: chosen by the system, see the log"),
        ("http port", _shown(*target), tls.removesuffix("; "))
        if target
        else ("http port", "none", "--http-port opens one"),
        ("control port", _shown(options.control_host, options.control_port), "for workers"),
    ]


def _shown(host: str, port: int) -> str:
    return host if host.startswith("unix:") else f"{host}:{port}"


def _tokenizer(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Only where there is none."""
    if resolved.has_tokenizer:
        return []
    return [("tokenizer", "none", resolved.reasons.get("skip_tokenizer_init", "as given"))]


def _gpu_cache(options: Options, block_size: int) -> tuple[str, str]:
    size = f"blocks of {block_size} tokens"
    if options.num_gpu_blocks_override is not None:
        return f"{options.num_gpu_blocks_override} {size}", "num_gpu_blocks_override"
    if options.kv_cache_memory_bytes is not None:
        return f"{options.kv_cache_memory_bytes} bytes in {size}", "kv_cache_memory_bytes"
    return size, "the gpu worker measures how many fit, see the log"
