"""The flags of every command that starts an engine, each named once: type, help and default."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from neo_server.host_memory import parse_size
from protos.config import KvCacheDType

Device = Literal["auto", "cpu", "cuda"]
DTypeChoice = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
KernelBackend = Literal["auto", "torch", "triton"]
LogFormat = Literal["text", "json"]
DEFAULT_CONTROL_PORT = 50052
# How `neo serve --help` groups them.
PANELS = {
    "Clients": (
        *("host", "port", "http_port", "http_host", "api_key", "served_model_name"),
        *("max_num_queued_reqs", "max_num_queued_tokens", "shutdown_timeout", "address_file"),
        *("uds", "ssl_certfile", "ssl_keyfile"),
    ),
    "Logs": ("log_stats_interval", "log_format"),
    "Model": (
        *("max_model_len", "dtype", "load_format", "skip_tokenizer_init", "max_logprobs", "seed"),
    ),
    "Scheduling": (
        *("scheduling_policy", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
        *("tpot_slo_ms", "ttft_slo_ms", "max_skipped_iterations", "profile", "profile_dir"),
        "enable_piggyback",
    ),
    "GPU and GPU-cache": (
        *("device", "gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
        *("block_size", "kernel_backend", "enforce_eager"),
    ),
    "CPU-cache and CPU attention": (
        *("kv_offloading_size", "cpu_kv_cache_dtype", "cpu_kv_page_size", "cpu_attn_workers"),
        *("cpu_attn_threads", "reserved_cores", "shm_dir"),
    ),
    "Worker processes": (
        *("control_host", "control_port", "spawn_gpu_worker", "spawn_cpu_attn_workers"),
        *("plan_timeout", "cpu_attn_timeout"),
    ),
}
PUBLIC = (*PANELS["Clients"], *PANELS["Logs"])  # what no command but `neo serve` has
CpuCacheSize = Annotated[
    float | None,
    Option(
        parser=parse_size,
        metavar="GIB|auto",
        help="Of the CPU-cache. Default: auto, by free memory; gpu-only: 0.",
    ),
]


@dataclass(frozen=True, slots=True)
class Options:
    """``None`` and ``auto`` are for ``launch.resolve`` to choose."""

    model: Annotated[
        str,
        Argument(
            help="Local Hugging Face directory, or hub id; with --load-format dummy also "
            "Llama-2-7B, Llama-3.1-8B or Llama-3.1-70B."
        ),
    ]
    host: Annotated[
        str,
        Option(help="Of gRPC; unix:///path: a Unix domain socket, and --port counts for nothing."),
    ] = "127.0.0.1"
    port: Annotated[int, Option(help="Of gRPC; 0: any free port.")] = 50051
    http_port: Annotated[
        int | None, Option(help="Of the OpenAI API; 0: any free port. Default: no HTTP.")
    ] = None
    http_host: Annotated[
        str | None,
        Option(help="Default: --host, or 127.0.0.1 where that is a socket; may be unix:///path."),
    ] = None
    uds: Annotated[
        Path | None, Option(help="The OpenAI API on this Unix domain socket, as in vLLM.")
    ] = None
    ssl_certfile: Annotated[
        Path | None, Option(help="PEM; gRPC and HTTP are encrypted. Needs --ssl-keyfile.")
    ] = None
    ssl_keyfile: Annotated[Path | None, Option(help="PEM, without a password.")] = None
    control_host: Annotated[str, Option(help="Where workers register.")] = "127.0.0.1"
    control_port: Annotated[int, Option(help="0: any free port.")] = DEFAULT_CONTROL_PORT
    address_file: Annotated[
        Path | None,
        Option(help="Gets 'HOST:PORT CONTROL_HOST:PORT [HTTP_HOST:PORT]' when ready."),
    ] = None
    served_model_name: Annotated[
        str | None, Option(help="What clients call it. Default: MODEL as given.")
    ] = None
    max_model_len: Annotated[
        int | None, Option(help="Tokens of prompt and answer. Default: the model's.")
    ] = None
    max_num_seqs: Annotated[
        int | None, Option(help="Sequences that run at once. Default: 256.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Tokens of one iteration. Default: 2048.")
    ] = None
    enable_chunked_prefill: Annotated[bool, Option(help="Spread a prompt over iterations.")] = True
    tpot_slo_ms: Annotated[
        float | None, Option(help="Target for an iteration, kept where chunk sizes allow.")
    ] = None
    ttft_slo_ms: Annotated[
        float | None, Option(help="Target for the first token: chunks grow where it is in reach.")
    ] = None
    max_skipped_iterations: Annotated[
        int, Option(help="In a row, that a CPU-request may be left out.", min=1)
    ] = 32
    max_logprobs: Annotated[
        int, Option(help="The most alternatives that logprobs can ask for.", min=0, max=1024)
    ] = 20
    enable_piggyback: Annotated[
        bool, Option(help="CPU-requests may ride, a stage an iteration, where the worker can.")
    ] = True
    profile: Annotated[
        bool, Option(help="Measure stage times at start, unless they are stored.")
    ] = True
    profile_dir: Annotated[
        Path | None, Option(help="Where they are stored. Default: ~/.cache/neo/profiles.")
    ] = None
    scheduling_policy: Annotated[
        str,
        Option(
            help="gpu-only, simple-offload, symmetric, fastdecode-plus, "
            "neo, mixed, piggyback, or module:attribute."
        ),
    ] = "neo"
    skip_tokenizer_init: Annotated[
        bool, Option(help="Prompts and outputs are token ids; no tokenizer is needed.")
    ] = False
    block_size: Annotated[int, Option(help="Tokens of a GPU block.")] = 16
    num_gpu_blocks_override: Annotated[
        int | None, Option(help="Size of the GPU-cache in blocks.")
    ] = None
    kv_cache_memory_bytes: Annotated[int | None, Option(help="Size of the GPU-cache in bytes.")] = (
        None
    )
    gpu_memory_utilization: Annotated[
        float, Option(help="Share of the GPU's memory for weights and GPU-cache.")
    ] = 0.9
    kv_offloading_size: CpuCacheSize = None
    cpu_kv_page_size: Annotated[int, Option(help="Tokens of a CPU page.")] = 64
    cpu_kv_cache_dtype: Annotated[KvCacheDType, Option(help="auto: --dtype.")] = KvCacheDType.AUTO
    dtype: Annotated[
        DTypeChoice,
        Option(help="Of weights and activations. auto: the checkpoint's; on the CPU float32."),
    ] = "auto"
    device: Annotated[
        Device, Option(help="Where the gpu worker runs. auto: CUDA if there is one.")
    ] = "auto"
    load_format: Annotated[LoadFormat, Option(help="dummy: random weights.")] = "auto"
    kernel_backend: Annotated[
        KernelBackend, Option(help="auto: Triton where the device has what it needs.")
    ] = "auto"
    enforce_eager: Annotated[bool, Option(help="No CUDA graphs.")] = False
    cpu_attn_workers: Annotated[
        int | None, Option(help="Processes that the server runs. Default: 2; gpu-only: 0.")
    ] = None
    cpu_attn_threads: Annotated[
        int | None, Option(help="Of each worker. Default: unreserved cores / workers.")
    ] = None
    reserved_cores: Annotated[
        int | None, Option(help="Cores that no attention thread is pinned to. CUDA: 2.")
    ] = None
    shm_dir: Annotated[Path | None, Option(help="A tmpfs instead of POSIX shared memory.")] = None
    shutdown_timeout: Annotated[
        float, Option(help="Seconds that running streams get at shutdown.")
    ] = 30.0
    plan_timeout: Annotated[
        float | None,
        Option(
            help="Seconds after which a gpu worker without a result counts as hung; those of "
            "waiting for cpu workers are added. Default: 60; on the CPU 600."
        ),
    ] = None
    cpu_attn_timeout: Annotated[
        float,
        Option(help="Seconds of waiting for cpu workers after which a plan's CPU rows are void."),
    ] = 10.0
    max_num_queued_reqs: Annotated[
        int, Option(help="Requests that may wait; more are refused.")
    ] = 4096
    max_num_queued_tokens: Annotated[
        int | None, Option(help="Tokens of waiting requests; more are refused. Default: no limit.")
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            envvar="NEO_API_KEY",
            help="What clients have to send: 'authorization: Bearer KEY', over gRPC and HTTP.",
        ),
    ] = field(default=None, repr=False)
    log_format: Annotated[LogFormat, Option(help="json: one object a line.")] = "text"
    log_stats_interval: Annotated[
        float, Option(help="Seconds between lines of throughput and cache use; 0: no such lines.")
    ] = 10.0
    spawn_gpu_worker: Annotated[
        bool, Option(help="--no-...: `neo gpu-worker` is started by hand.")
    ] = True
    spawn_cpu_attn_workers: Annotated[
        bool,
        Option(help="--no-...: as many as --cpu-attn-workers says are started by somebody else."),
    ] = True
    seed: Annotated[int, Option(help="Of dummy weights.")] = 0

    @property
    def http_target(self) -> tuple[str, int] | None:
        """Host and port of HTTP; the port of ``unix:///path`` is 0. None: there is no HTTP."""
        host = f"unix://{self.uds.absolute()}" if self.uds is not None else self.http_host
        if host is not None and host.startswith("unix:"):
            return host, 0
        if self.http_port is None:
            return None
        if host is None:
            host = "127.0.0.1" if self.host.startswith("unix:") else self.host
        return host, self.http_port
