"""``neo bench throughput``: all requests at once, one line of figures for each policy and work."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import uvloop
from rich.console import Console
from typer import Option

from neo_server.banner import print_banner
from neo_server.bench.counters import fresh_entries, work_between
from neo_server.bench.drive import check_longest, drive, emptied
from neo_server.bench.throughput_figures import figures
from neo_server.bench.timeline import Recording
from neo_server.bench.workload import Prompt, prompts_of
from neo_server.bench.works import Work, swept
from neo_server.engine import Engine
from neo_server.errors import ConfigurationError
from neo_server.launch import Options, Resolved, resolve
from neo_server.progress import progress
from neo_server.server import Server
from neo_server.shared_memory import SharedMemory
from neo_server.simulator.workload import Lengths
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
    sweep: Annotated[
        list[str] | None,
        Option(
            metavar="WORK",
            help="INPUT/OUTPUT or a trace's path, with :REQUESTS behind it where --num-prompts is "
            "not for all. May be given several times: works that run one after the other on one "
            "engine, each from empty caches and with a line of its own, in place of --input-len, "
            "--output-len and --dataset-path.",
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
            "policies a file each, OUT-POLICY.json; of --sweep the first work's only.",
            dir_okay=False,
        ),
    ] = None
    trace_after: Annotated[int, Option(help="Plans before the recorded ones.", min=0)] = 16
    trace_iterations: Annotated[int, Option(help="Recorded plans.", min=1)] = 4


def run(options: Options, flags: ThroughputFlags, console: Console) -> None:
    """Prints a JSON line for every work of every policy as soon as it is over.

    Raises ``NeoError``; what is impossible before any worker starts.
    """
    works = works_of(flags)
    names = [name.strip() for name in (flags.policies or options.scheduling_policy).split(",")]
    each = [replace(options, scheduling_policy=name) for name in names]
    for one in each:
        _lengths(one, flags, works)
    first: dict[int, float] = {}  # of the first policy, by work

    def say(index: int, line: dict[str, Any]) -> None:
        if flags.policies is not None:
            base = first.setdefault(index, line["requests_per_s"])
            line["relative"] = line["requests_per_s"] / base
        print(json.dumps(line), flush=True)

    for one in each:
        run_policy(one, flags, works, console, say)
        gc.collect()  # an unlinked CPU-cache takes memory until its last mapping goes


def works_of(flags: ThroughputFlags) -> list[Work]:
    """Those of ``--sweep``, or the one of the other flags. Raises ``ConfigurationError``."""
    if not flags.sweep:
        return [Work(flags.input_len, flags.output_len, flags.num_prompts, flags.dataset_path)]
    default = ThroughputFlags()
    for name in ("input_len", "output_len", "dataset_path"):
        value = getattr(flags, name)
        if value != getattr(default, name):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is {value}; with --sweep, which says it for each "
                "work, it must be left out"
            )
    return swept(flags.sweep, flags.num_prompts)


def run_policy(
    options: Options,
    flags: ThroughputFlags,
    works: Sequence[Work],
    console: Console,
    say: Callable[[int, dict[str, Any]], None],
) -> None:
    """Starts the workers, runs the works one after the other and ends the workers.

    ``say`` gets each work's place in ``works`` and its figures, as soon as it is over.
    """
    lengths = _lengths(options, flags, works)
    limit = max(options.max_num_queued_reqs, *map(len, lengths))
    options = replace(options, max_num_queued_reqs=limit)
    resolved = resolve(options)
    print_banner(console, options, resolved, offline=True)
    recordings: list[Recording] = []

    def record(memory: SharedMemory) -> None:
        sizes = flags.trace_after, flags.trace_iterations
        recordings.append(Recording.start(memory.location, *sizes))

    async def all_works(state: ServerState, engine: Engine) -> None:
        check_longest(engine, max(map(sum, chain(*lengths))))
        for recording in recordings:
            recording.watch(engine.scheduler)
        for index, (work, its) in enumerate(zip(works, lengths, strict=True)):
            what = {"model": options.model, "policy": options.scheduling_policy}
            if work.name is not None:
                what = {"work": work.name, **what}
            prompts = prompts_of(its, resolved.model.vocab_size, options.seed)
            title = f"{options.scheduling_policy} {work.name or ''}".rstrip()
            with progress(console, title, len(prompts)) as advance:
                measured = await _measure(state, engine, prompts, flags.temperature, advance)
            for recording in recordings if index == 0 else ():
                recording.write(timeline_path(flags, options.scheduling_policy))
            say(index, {**what, **measured, **_settings(options, resolved, state, engine)})

    server = Server(options, resolved)
    if flags.trace_timeline is not None:
        server.before_workers = record
    uvloop.run(server.offline(all_works))


async def _measure(
    state: ServerState,
    engine: Engine,
    prompts: Sequence[Prompt],
    temperature: float,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Runs one work from empty caches to empty caches; its figures, without those before it."""
    engine.reset_metrics()
    before = await fresh_entries(state.memory)
    begin, records = await drive(engine, prompts, temperature, advance)
    await emptied(engine)
    cpu = work_between(before, await fresh_entries(state.memory))
    return figures(begin, prompts, records, engine.scheduler.metrics, cpu)


def _settings(
    options: Options, resolved: Resolved, state: ServerState, engine: Engine
) -> dict[str, Any]:
    """What the figures depend on, beside the work."""
    config = resolved.config
    return {
        "device": state.gpu.device,
        "dtype": config.worker.dtype.value,
        "num_gpu_blocks": engine.scheduler.blocks.blocks.total,
        "num_cpu_pages": engine.scheduler.blocks.pages.total,
        "cpu_kv_cache_dtype": config.cache.cpu_kv_cache_dtype.value,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "seed": options.seed,
    }


def timeline_path(flags: ThroughputFlags, policy: str) -> Path:
    """Where a policy's timeline goes."""
    path = flags.trace_timeline
    assert path is not None
    return path if flags.policies is None else path.with_stem(f"{path.stem}-{policy}")


def _lengths(options: Options, flags: ThroughputFlags, works: Sequence[Work]) -> list[Lengths]:
    limit = resolve(options).config.scheduler.max_model_len
    return [work.lengths(limit, options.seed, flags.random_range_ratio) for work in works]
