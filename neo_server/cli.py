"""The command ``neo``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import grpc
import typer
import uvloop
from rich.console import Console

from neo_server.bench.commands import app as bench_app
from neo_server.client_flags import (
    ChatFlags,
    GenerateFlags,
    SamplingFlags,
    ServerFlags,
    TopFlags,
)
from neo_server.config_file import ConfigFlags
from neo_server.errors import NeoError
from neo_server.flags import takes
from neo_server.log import log_to
from neo_server.options import DEFAULT_CONTROL_PORT, PANELS, CpuCacheSize, Device, Options
from protos import control_pb2, control_pb2_grpc
from protos.credentials import key_metadata

_SERVE, _USE, _MEASURE = "Serve a model", "Use a running server", "Measure and plan"
app = typer.Typer(
    name="neo",
    help="LLM inference with part of the KV cache, and its decode attention, on the CPU.",
    epilog="First `neo serve MODEL` in one terminal, then `neo chat` or `neo top` in another. "
    "`neo COMMAND --help` has every flag; `neo --install-completion` completes them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench", rich_help_panel=_MEASURE)
_AS_SERVE = "As of `neo serve`."
_CONTROL = f"127.0.0.1:{DEFAULT_CONTROL_PORT}"


@app.command(rich_help_panel=_SERVE)
@takes(Options, ConfigFlags, panels=PANELS)
def serve(options: Options, _config: ConfigFlags) -> None:
    """Serves a model over gRPC, and with --http-port over OpenAI's HTTP."""
    from neo_native import NativeError
    from neo_server.banner import print_banner
    from neo_server.launch import resolve
    from neo_server.server import Server

    console = Console(stderr=True)
    log_to(console, options.log_format)
    try:
        resolved = resolve(options)
        server = Server(options, resolved)
        print_banner(console, options, resolved)
        uvloop.run(server.run())
    except (NeoError, NativeError, ValueError) as error:
        _fail(error)


@app.command(rich_help_panel=_USE)
@takes(GenerateFlags, SamplingFlags, ServerFlags)
def generate(flags: GenerateFlags, sampling: SamplingFlags, server: ServerFlags) -> None:
    """Streams completions of one or more prompts to the terminal."""
    from neo_server.terminal import print_answers

    texts = [sys.stdin.read() if text == "-" else text for text in flags.prompt]
    try:
        with server.client() as client:
            print_answers(client, texts, sampling.params(), chat=flags.chat)
    except NeoError as error:
        _fail(error)


@app.command(rich_help_panel=_USE)
@takes(ChatFlags, SamplingFlags, ServerFlags)
def chat(flags: ChatFlags, sampling: SamplingFlags, server: ServerFlags) -> None:
    """A conversation with the model, with tokens per second and placement of every answer."""
    from neo_server.chat import chat as run

    try:
        with server.client() as client:
            run(client, sampling.params(), flags.system)
    except NeoError as error:
        _fail(error)


@app.command(rich_help_panel=_USE)
@takes(TopFlags, ServerFlags)
def top(flags: TopFlags, server: ServerFlags) -> None:
    """A live view: requests, GPU and CPU decodes, both caches, workers. Ctrl-C ends it."""
    from neo_server.top import top as run

    try:
        with server.client(timeout_s=10.0) as client:
            run(client, flags.interval, once=flags.once)
    except NeoError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command("gpu-worker", rich_help_panel=_SERVE)
def gpu_worker(
    server: Annotated[str, typer.Option(help="HOST:PORT of the control service.")] = _CONTROL,
    rank: Annotated[int, typer.Option(help="Of the GPU; there is one, 0.")] = 0,
) -> None:
    """Starts a gpu worker by hand."""
    _become("gpu_worker", server, "--rank", str(rank))


@app.command("cpu-attn-worker", rich_help_panel=_SERVE)
def cpu_attn_worker(
    server: Annotated[str, typer.Option(help="HOST:PORT of the control service.")] = _CONTROL,
    threads: Annotated[int | None, typer.Option(help="Default: as the server says.")] = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--no-pin", help="Default: as the server says.")
    ] = None,
) -> None:
    """Starts a cpu-attention worker by hand; it joins the running server."""
    more: tuple[str, ...] = () if threads is None else ("--threads", str(threads))
    if pin is not None:
        more += ("--pin" if pin else "--no-pin",)
    _become("cpu_attn_worker", server, *more)


@app.command(rich_help_panel=_SERVE)
def scale(
    cpu_attn_workers: Annotated[int, typer.Option(help="How many the server runs.", min=0)],
    server: Annotated[str, typer.Option(help="HOST:PORT of the control service.")] = _CONTROL,
    api_key: Annotated[
        str | None, typer.Option(envvar="NEO_API_KEY", help="The server's, where it has one.")
    ] = None,
) -> None:
    """Changes the number of cpu-attention workers while requests run."""
    try:
        with grpc.insecure_channel(server) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            request = control_pb2.ScaleRequest(cpu_attn_workers=cpu_attn_workers)
            reply = stub.Scale(request, timeout=10.0, metadata=key_metadata(api_key))
    except grpc.RpcError as error:
        _fail(error)
    typer.echo(f"cpu-attention workers: {reply.previous} -> {cpu_attn_workers}")


@app.command(rich_help_panel=_MEASURE)
def profile(
    model: Annotated[str, typer.Argument(help="Local Hugging Face directory, or hub id.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cpu_attn_workers: Annotated[int | None, typer.Option(help=_AS_SERVE)] = None,
    kv_offloading_size: CpuCacheSize = None,
    max_model_len: Annotated[int | None, typer.Option(help=_AS_SERVE)] = None,
    output: Annotated[Path | None, typer.Option(help="Gets the table as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG; needs matplotlib.")] = None,
) -> None:
    """Prints what each stage costs on this machine: the table that the scheduler plans with."""
    from neo_server.launch import resolve
    from neo_server.profile_report import measure, print_table
    from neo_server.profile_report import plot as draw

    options = Options(
        model=model,
        port=0,
        control_port=0,
        device=cast(Device, device),
        cpu_attn_workers=cpu_attn_workers,
        kv_offloading_size=kv_offloading_size,
        max_model_len=max_model_len,
    )
    try:
        table = uvloop.run(measure(options, resolve(options)))
    except (NeoError, ValueError) as error:
        _fail(error)
        return
    print_table(Console(), table)
    if output is not None:
        output.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        draw(table, plot)


@app.command(rich_help_panel=_MEASURE)
def simulate(
    hardware: Annotated[str, typer.Option(help="A built-in profile, or a JSON file.")],
    model: Annotated[str, typer.Option(help="llama-2-7b, llama-3.1-8b or llama-3.1-70b.")],
    policy: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Azure CSV or OSC JSON.")] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1000,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 200,
    num_requests: Annotated[int, typer.Option(help="Of a trace the first that fit.")] = 200,
    request_rate: Annotated[float | None, typer.Option(help="Per second. Default: all.")] = None,
    gpu_tokens: Annotated[int | None, typer.Option(help="Of GPU-cache. Default: fits.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help=_AS_SERVE)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help=_AS_SERVE)] = 2048,
    max_model_len: Annotated[int, typer.Option(help=_AS_SERVE)] = 8192,
    enable_chunked_prefill: Annotated[bool, typer.Option(help=_AS_SERVE)] = True,
    tpot_slo_ms: Annotated[float | None, typer.Option(help=_AS_SERVE)] = None,
    ttft_slo_ms: Annotated[float | None, typer.Option(help=_AS_SERVE)] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Times as neo profile --output measured them; the hardware gives sizes of memory.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    cpu_bandwidth: Annotated[float, typer.Option(help="Factor on the hardware's.")] = 1.0,
    cpu_kv_cache_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="int8: half the bytes of the GPU-cache's.")
    ] = "auto",
    enable_piggyback: Annotated[bool, typer.Option(help=_AS_SERVE)] = True,
    plot: Annotated[Path | None, typer.Option(help="PNG; needs matplotlib.")] = None,
) -> None:
    """Runs the scheduler under a virtual clock on a machine that need not be there."""
    from neo_server.simulator.command import Request, run

    request = Request(
        **{name: value for name, value in locals().items() if name not in ("Request", "run")}
    )
    try:
        run(request, Console())
    except (NeoError, ValueError, OSError) as error:
        _fail(error)


def _become(module: str, server: str, *arguments: str) -> None:
    """Packages do not import each other: the worker replaces this process."""
    from neo_server.supervisor import python_path, worker_command

    environment = {**os.environ, "PYTHONPATH": python_path()}
    os.execve(sys.executable, worker_command(module, server, *arguments), environment)


def _fail(error: Exception) -> None:
    if isinstance(error, grpc.Call):
        typer.echo(f"neo: {error.code().name}: {error.details()}", err=True)
    elif isinstance(error, NeoError) and error.code is not grpc.StatusCode.INTERNAL:
        typer.echo(f"neo: {error.code.name}: {error}", err=True)
    else:
        typer.echo(f"neo: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``neo`` script."""
    app()
