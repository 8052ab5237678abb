"""The command ``neo``."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, cast

import grpc
import typer
import uvloop
from rich.console import Console
from rich.logging import RichHandler

from neo_server.errors import ConfigurationError, NeoError
from neo_server.launch import Device, LoadFormat, Options, resolve
from protos import control_pb2, control_pb2_grpc

app = typer.Typer(
    name="neo",
    help="LLM inference with part of the KV cache, and its decode attention, on the CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_DEFAULTS = Options(model="")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Local Hugging Face directory, or hub id.")],
    host: str = _DEFAULTS.host,
    port: Annotated[int, typer.Option(help="0: any free port.")] = _DEFAULTS.port,
    control_host: Annotated[str, typer.Option(help="For workers.")] = _DEFAULTS.control_host,
    control_port: Annotated[int, typer.Option(help="0: any free port.")] = 0,
    address_file: Annotated[
        Path | None, typer.Option(help="Gets 'HOST:PORT CONTROL_HOST:PORT' when ready.")
    ] = None,
    served_model_name: str | None = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens.")] = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one iteration.")
    ] = None,
    enable_chunked_prefill: bool = True,
    scheduling_policy: Annotated[
        str, typer.Option(help="gpu-only, simple-offload, mixed, neo, or module:attribute.")
    ] = _DEFAULTS.scheduling_policy,
    block_size: Annotated[int, typer.Option(help="Tokens of a GPU block.")] = _DEFAULTS.block_size,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="Of the GPU-cache.")] = None,
    gpu_memory_utilization: float = _DEFAULTS.gpu_memory_utilization,
    kv_offloading_size: Annotated[
        float, typer.Option(help="GiB of the CPU-cache.")
    ] = _DEFAULTS.kv_offloading_size,
    cpu_kv_page_size: Annotated[
        int, typer.Option(help="Tokens of a CPU page.")
    ] = _DEFAULTS.cpu_kv_page_size,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights.")] = "auto",
    cpu_attn_workers: Annotated[
        int, typer.Option(help="Processes that the server runs.")
    ] = _DEFAULTS.cpu_attn_workers,
    cpu_attn_threads: Annotated[
        int, typer.Option(help="Of each worker.")
    ] = _DEFAULTS.cpu_attn_threads,
    shm_dir: Annotated[
        Path | None, typer.Option(help="A tmpfs instead of POSIX shared memory.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running streams get at shutdown.")
    ] = _DEFAULTS.shutdown_timeout,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused.")
    ] = _DEFAULTS.max_waiting,
    spawn_gpu_worker: Annotated[
        bool, typer.Option(help="--no-...: `neo gpu-worker` is started by hand.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of dummy weights.")] = 0,
) -> None:
    """Serves a model over gRPC."""
    for name, value, known in (
        ("dtype", dtype, ("auto", "float32", "float16", "bfloat16")),
        ("device", device, ("auto", "cpu", "cuda")),
        ("load_format", load_format, ("auto", "dummy")),
    ):
        if value not in known:
            raise typer.BadParameter(f"{name} is {value!r}; known are {', '.join(known)}")
    options = Options(
        model=model,
        host=host,
        port=port,
        control_host=control_host,
        control_port=control_port,
        address_file=address_file,
        served_model_name=served_model_name,
        shutdown_timeout=shutdown_timeout,
        max_waiting=max_waiting,
        spawn_gpu_worker=spawn_gpu_worker,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        scheduling_policy=scheduling_policy,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_offloading_size=kv_offloading_size,
        cpu_kv_page_size=cpu_kv_page_size,
        shm_dir=shm_dir,
        dtype=dtype,
        device=cast(Device, device),
        load_format=cast(LoadFormat, load_format),
        cpu_attn_workers=cpu_attn_workers,
        cpu_attn_threads=cpu_attn_threads,
        seed=seed,
    )
    _run_server(options)


def _run_server(options: Options) -> None:
    from neo_native import NativeError
    from neo_server.banner import print_banner
    from neo_server.server import Server

    console = Console(stderr=True)
    _log_to(console)
    try:
        resolved = resolve(options)
        server = Server(options, resolved)
        print_banner(console, options, resolved)
        uvloop.run(server.run())
    except (NeoError, NativeError, ValueError) as error:
        _fail(error)


def _log_to(console: Console) -> None:
    """For people on a terminal; one plain line an event in a file."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, markup=False)
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=logging.INFO, format=line)


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="Prompts; '-' reads one from stdin.")],
    server: Annotated[str, typer.Option(help="HOST:PORT")] = "127.0.0.1:50051",
    chat: Annotated[bool, typer.Option(help="Apply the chat template of --model.")] = False,
    model: Annotated[Path | None, typer.Option(help="Model directory, for --chat.")] = None,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    ignore_eos: bool = False,
) -> None:
    """Streams completions of one or more prompts to the terminal."""
    from neo_server.client import Sampling, run_client

    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    texts = [sys.stdin.read() if text == "-" else text for text in prompt]
    try:
        run_client(server, texts, sampling, model if chat else None, chat=chat)
    except (grpc.RpcError, ConfigurationError, ValueError) as error:
        _fail(error)


@app.command("gpu-worker")
def gpu_worker(
    server: Annotated[str, typer.Option(help="HOST:PORT of the control service.")],
    rank: int = 0,
) -> None:
    """Starts a gpu worker by hand."""
    _become("gpu_worker", "--server", server, "--rank", str(rank))


@app.command("cpu-attn-worker")
def cpu_attn_worker(
    server: Annotated[str, typer.Option(help="HOST:PORT of the control service.")],
    threads: Annotated[int | None, typer.Option(help="Default: as the server says.")] = None,
) -> None:
    """Starts a cpu-attention worker by hand; it joins the running server."""
    more = () if threads is None else ("--threads", str(threads))
    _become("cpu_attn_worker", "--server", server, *more)


@app.command()
def scale(
    cpu_attn_workers: Annotated[int, typer.Option(help="How many the server runs.", min=0)],
    server: Annotated[str, typer.Option(help="HOST:PORT of the control service.")],
) -> None:
    """Changes the number of cpu-attention workers while requests run."""
    try:
        with grpc.insecure_channel(server) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            request = control_pb2.ScaleRequest(cpu_attn_workers=cpu_attn_workers)
            reply = stub.Scale(request, timeout=10.0)
    except grpc.RpcError as error:
        _fail(error)
    typer.echo(f"cpu-attention workers: {reply.previous} -> {cpu_attn_workers}")


def _become(module: str, *arguments: str) -> None:
    """Packages do not import each other: the worker replaces this process."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _fail(error: Exception) -> None:
    if isinstance(error, grpc.Call):
        typer.echo(f"neo: {error.code().name}: {error.details()}", err=True)
    else:
        typer.echo(f"neo: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``neo`` script."""
    app()
