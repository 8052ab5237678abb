"""``neo bench throughput``: all requests at once, one line of figures for each policy."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import uvloop
from rich.console import Console
from typer import Option

from neo_server.banner import print_banner
from neo_server.bench.counters import fresh_entries, work_between
from neo_server.bench.drive import drive
from neo_server.bench.throughput_figures import figures
from neo_server.bench.timeline import Recording
from neo_server.bench.workload import Prompt, lengths_of, prompts_of
from neo_server.engine import Engine
from neo_server.launch import Options, resolve
from neo_server.progress import progress
from neo_server.server import Server
from neo_server.shared_memory import SharedMemory
from neo_server.state import ServerState


@dataclass(frozen=True, slots=True)
class ThroughputFlags:
    """The flags of ``neo bench throughput`` beside the engine's."""

    input_len: Annotated[int, Option(help="Tokens of a prompt.")] = 1000
    output_len: Annotated[int, Option(help="Tokens that each request generates.")] = 100
    num_prompts: Annotated[
        int | None, Option(help="Requests. Default: 100; of a trace all.", min=1)
    ] = None
    random_range_ratio: Annotated[
        float, Option(help="Lengths are uniform within this share of both.", min=0.0, max=1.0)
    ] = 0.0
    dataset_path: Annotated[
        Path | None,
        Option(
            help="A trace instead of fixed lengths: CSV with ContextTokens and GeneratedTokens, "
            "or JSON with prompt and max_tokens.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    temperature: Annotated[float, Option(help="0: greedy.", min=0.0)] = 1.0
    policies: Annotated[
        str | None, Option(help="Names with commas, run one after the other, side by side.")
    ] = None
    trace_timeline: Annotated[
        Path | None,
        Option(
            help="A timeline of a few iterations, as Chrome-trace JSON for Perfetto. With several "
            "policies a file each, OUT-POLICY.json.",
            dir_okay=False,
        ),
    ] = None
    trace_after: Annotated[int, Option(help="Plans before the recorded ones.", min=0)] = 16
    trace_iterations: Annotated[int, Option(help="Recorded plans.", min=1)] = 4


def run(options: Options, flags: ThroughputFlags, console: Console) -> None:
    """Prints a JSON line a policy. Raises ``NeoError``; what is impossible before any starts."""
    names = [name.strip() for name in (flags.policies or options.scheduling_policy).split(",")]
    each = [replace(options, scheduling_policy=name) for name in names]
    first: dict[str, Any] | None = None
    for one in each:
        _prompts(one, flags)
    for one in each:
        line = run_policy(one, flags, console)
        if flags.policies is not None:
            first = first or line
            line["relative"] = line["requests_per_s"] / first["requests_per_s"]
        print(json.dumps(line), flush=True)
        gc.collect()  # an unlinked CPU-cache takes memory until its last mapping goes


def run_policy(options: Options, flags: ThroughputFlags, console: Console) -> dict[str, Any]:
    """Starts the workers, runs the requests and ends the workers; returns the figures."""
    prompts = _prompts(options, flags)
    limit = max(options.max_num_queued_reqs, len(prompts))
    options = replace(options, max_num_queued_reqs=limit)
    resolved = resolve(options)
    print_banner(console, options, resolved, offline=True)

    recordings: list[Recording] = []

    def record(memory: SharedMemory) -> None:
        sizes = flags.trace_after, flags.trace_iterations
        recordings.append(Recording.start(memory.location, *sizes))

    async def work(state: ServerState, engine: Engine) -> dict[str, Any]:
        for recording in recordings:
            recording.watch(engine.scheduler)
        before = await fresh_entries(state.memory)
        with progress(console, options.scheduling_policy, len(prompts)) as advance:
            begin, records = await drive(engine, prompts, flags.temperature, advance)
        cpu = work_between(before, await fresh_entries(state.memory))
        for recording in recordings:
            recording.write(timeline_path(flags, options.scheduling_policy))
        return {
            "model": options.model,
            "policy": options.scheduling_policy,
            **figures(begin, prompts, records, engine.scheduler.metrics, cpu),
            "device": state.gpu.device,
            "dtype": resolved.config.worker.dtype.value,
            "num_gpu_blocks": engine.scheduler.blocks.blocks.total,
            "num_cpu_pages": engine.scheduler.blocks.pages.total,
            "cpu_kv_cache_dtype": resolved.config.cache.cpu_kv_cache_dtype.value,
            "max_num_batched_tokens": resolved.config.scheduler.max_num_batched_tokens,
            "seed": options.seed,
        }

    server = Server(options, resolved)
    if flags.trace_timeline is not None:
        server.before_workers = record
    return uvloop.run(server.offline(work))


def timeline_path(flags: ThroughputFlags, policy: str) -> Path:
    """Where a policy's timeline goes."""
    path = flags.trace_timeline
    assert path is not None
    return path if flags.policies is None else path.with_stem(f"{path.stem}-{policy}")


def _prompts(options: Options, flags: ThroughputFlags) -> list[Prompt]:
    resolved = resolve(options)
    lengths = lengths_of(
        *(flags.dataset_path, flags.input_len, flags.output_len, flags.num_prompts),
        resolved.config.scheduler.max_model_len,
        options.seed,
        flags.random_range_ratio,
    )
    return prompts_of(lengths, resolved.model.vocab_size, options.seed)
