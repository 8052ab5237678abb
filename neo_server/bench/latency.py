"""``neo bench latency``: one batch, its decode and prefill times beside the device's floor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import uvloop
from rich.console import Console
from typer import Option

from neo_server.banner import print_banner
from neo_server.bench.device_rates import Rates, measure_rates
from neo_server.bench.drive import Recorder, drive
from neo_server.bench.floor import Floor, decode_floor, prefill_floor, shape_of
from neo_server.bench.workload import lengths_of, prompts_of
from neo_server.engine import Engine
from neo_server.errors import ConfigurationError
from neo_server.launch import Options, Resolved, resolve
from neo_server.progress import progress
from neo_server.server import Server
from neo_server.state import ServerState


@dataclass(frozen=True, slots=True)
class LatencyFlags:
    """The flags of ``neo bench latency`` beside the engine's."""

    batch_size: Annotated[int, Option(help="Requests, all at once.", min=1)] = 8
    input_len: Annotated[int, Option(help="Tokens of a prompt.")] = 32
    output_len: Annotated[int, Option(help="Tokens that each request generates.")] = 128
    num_iters: Annotated[int, Option(help="Times that the batch is run.", min=1)] = 5
    num_iters_warmup: Annotated[int, Option(help="Times before those.", min=0)] = 1
    temperature: Annotated[float, Option(help="0: greedy.", min=0.0)] = 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run of the batch."""

    prefill: float  # from the submission to the last request's first token
    decode: tuple[float, ...]  # from token to token while every request decodes
    device: tuple[float, ...]  # of each of those, what the gpu worker reports


def run(options: Options, flags: LatencyFlags, console: Console) -> None:
    """Prints one JSON line. Raises ``NeoError``."""
    resolved = resolve(options)
    _check(resolved, flags)
    worker = resolved.config.worker
    rates = measure_rates(worker.device, worker.dtype.value)
    print_banner(console, options, resolved, offline=True)

    async def work(state: ServerState, engine: Engine) -> dict[str, Any]:
        times = await _repeat(engine, resolved, options.seed, flags, console)
        metrics = engine.scheduler.metrics
        return {
            "model": options.model,
            "policy": options.scheduling_policy,
            "device": state.gpu.device,
            "dtype": worker.dtype.value,
            **figures(times),
            "iterations": dict(metrics.iterations),
            "num_gpu_decodes": metrics.num_gpu_decodes,
            "num_cpu_decodes": metrics.num_cpu_decodes,
        }

    line = uvloop.run(Server(options, resolved).offline(work))
    print(json.dumps(line | floors(resolved, flags, rates, line)), flush=True)


def _check(resolved: Resolved, flags: LatencyFlags) -> None:
    most = resolved.config.scheduler.max_num_seqs
    if flags.batch_size > most:
        raise ConfigurationError(
            f"--batch-size is {flags.batch_size}; it must be at most max_num_seqs, {most}"
        )
    if flags.output_len < 2:
        raise ConfigurationError(f"--output-len is {flags.output_len}; it must be at least 2")
    lengths_of(
        *(None, flags.input_len, flags.output_len, flags.batch_size),
        resolved.config.scheduler.max_model_len,
        seed=0,
    )


async def _repeat(
    engine: Engine, resolved: Resolved, seed: int, flags: LatencyFlags, console: Console
) -> list[Times]:
    lengths = [(flags.input_len, flags.output_len)] * flags.batch_size
    prompts = prompts_of(lengths, resolved.model.vocab_size, seed)
    times = []
    runs = flags.num_iters_warmup + flags.num_iters
    with progress(console, "latency", runs) as advance:
        for index in range(runs):
            if index == flags.num_iters_warmup:
                engine.reset_metrics()
            times.append(times_of(*await drive(engine, prompts, flags.temperature)))
            advance()
    return times[flags.num_iters_warmup :]


def times_of(begin: float, records: Sequence[Recorder]) -> Times:
    """Where prompts take several iterations, what decodes meanwhile is part of the prefill."""
    last = max(records, key=lambda record: record.times[0])
    decode, device = (np.diff(x).tolist() for x in (last.times, last.device_times))
    return Times(last.times[0] - begin, tuple(decode), tuple(device))


def figures(times: Sequence[Times]) -> dict[str, Any]:
    """Medians, and the tail of the decode iterations of all runs."""
    decode = np.concatenate([one.decode for one in times])
    return {
        "decode_s": float(np.median(decode)),
        "decode_p99_s": float(np.percentile(decode, 99)),
        "decode_device_s": float(np.median(np.concatenate([one.device for one in times]))),
        "num_decode_iterations": len(decode),
        "prefill_s": float(np.median([one.prefill for one in times])),
    }


def floors(
    resolved: Resolved, flags: LatencyFlags, rates: Rates, line: dict[str, Any]
) -> dict[str, Any]:
    """The roofline, and how far the measured times of ``line`` are above it."""
    shape = shape_of(resolved.model, resolved.config.worker.dtype.itemsize)
    middle = flags.input_len + flags.output_len // 2  # of the context, over the decodes
    decode = decode_floor(shape, rates, flags.batch_size, middle)
    prefill = prefill_floor(shape, rates, flags.batch_size, flags.input_len)
    return {
        "batch_size": flags.batch_size,
        "input_len": flags.input_len,
        "output_len": flags.output_len,
        "measured_bytes_per_s": rates.bytes_per_s,
        "measured_flops": rates.flops,
        **_named("decode", decode, line["decode_s"]),
        **_named("prefill", prefill, line["prefill_s"]),
        "prefill_flops_share": prefill.flops / line["prefill_s"] / rates.flops,
    }


def _named(stage: str, floor: Floor, measured_s: float) -> dict[str, Any]:
    fields = asdict(floor)
    seconds = fields.pop("seconds")
    return {
        f"{stage}_roofline": fields,
        f"{stage}_roofline_s": seconds,
        f"{stage}_over_roofline": measured_s / seconds,
    }
