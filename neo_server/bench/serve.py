"""``neo bench serve``: a server that runs, as its clients see it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from rich.console import Console
from typer import Option

from neo_server.bench.serve_figures import details, figures, print_figures
from neo_server.bench.serve_jobs import Job, jsonl_jobs, random_jobs, send_times
from neo_server.bench.serve_record import Record
from neo_server.bench.serve_targets import GrpcTarget, HttpTarget, Target
from neo_server.client_flags import ServerFlags
from neo_server.errors import ConfigurationError, NeoError
from neo_server.progress import progress

_LOAD, _DATA, _RESULT = "Load", "Data set", "Result"


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The flags of ``neo bench serve``; names are vLLM's."""

    backend: Annotated[
        Literal["grpc", "openai", "openai-chat"],
        Option(help="NEO's gRPC, or OpenAI's completions or chat completions over HTTP."),
    ] = "grpc"
    base_url: Annotated[str, Option(help="For openai and openai-chat, without /v1.")] = (
        "http://127.0.0.1:8000"
    )
    dataset_name: Annotated[
        Literal["random", "trace", "jsonl"],
        Option(
            help="random: token ids at random, lengths from flags. trace: the same, lengths from "
            "--dataset-path. jsonl: prompts from --dataset-path.",
            rich_help_panel=_DATA,
        ),
    ] = "random"
    dataset_path: Annotated[
        Path | None,
        Option(
            help="trace: CSV with ContextTokens and GeneratedTokens, or JSON with prompt and "
            "max_tokens. jsonl: objects with prompt (text or token ids) and, if --output-len is "
            "not for all, max_tokens.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_DATA,
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option(help="Requests. Default: 100; of a data set all.", min=1, rich_help_panel=_DATA),
    ] = None
    input_len: Annotated[int, Option(help="Tokens of a prompt.", rich_help_panel=_DATA)] = 1024
    output_len: Annotated[int, Option(help="Tokens of an answer.", rich_help_panel=_DATA)] = 128
    random_range_ratio: Annotated[
        float,
        Option(
            help="Lengths are uniform within this share of both.",
            min=0.0,
            max=1.0,
            rich_help_panel=_DATA,
        ),
    ] = 0.0
    vocab_size: Annotated[
        int | None,
        Option(
            help="Token ids at random are below it. Default: the served model's, where it can be "
            "known.",
            min=1,
            rich_help_panel=_DATA,
        ),
    ] = None
    ignore_eos: Annotated[
        bool, Option(help="Every answer has its full length.", rich_help_panel=_LOAD)
    ] = False
    temperature: Annotated[float, Option(help="0: greedy.", min=0.0, rich_help_panel=_LOAD)] = 0.0
    request_rate: Annotated[
        float, Option(help="Per second. inf: all at once.", rich_help_panel=_LOAD)
    ] = math.inf
    burstiness: Annotated[
        float,
        Option(
            help="1: Poisson arrivals; less is burstier, more is steadier.", rich_help_panel=_LOAD
        ),
    ] = 1.0
    max_concurrency: Annotated[
        int | None,
        Option(
            help="Requests in flight; more wait in the client. Default: no limit.",
            min=1,
            rich_help_panel=_LOAD,
        ),
    ] = None
    num_warmups: Annotated[
        int, Option(help="Requests before, which do not count.", min=0, rich_help_panel=_LOAD)
    ] = 1
    seed: Annotated[int, Option(help="Of lengths, token ids, arrivals.", rich_help_panel=_LOAD)] = 0
    metric_percentiles: Annotated[str, Option(help="With commas.", rich_help_panel=_RESULT)] = "99"
    save_result: Annotated[
        bool, Option("--save-result", help="Write a JSON file.", rich_help_panel=_RESULT)
    ] = False
    save_detailed: Annotated[
        bool, Option("--save-detailed", help="With every request's.", rich_help_panel=_RESULT)
    ] = False
    result_dir: Annotated[
        Path, Option(help="Where the JSON file goes.", rich_help_panel=_RESULT)
    ] = Path()
    result_filename: Annotated[
        str | None,
        Option(help="Default: neo-BACKEND-RATEqps-MODEL-TIME.json.", rich_help_panel=_RESULT),
    ] = None


def run(flags: ServeFlags, server: ServerFlags, out: Console, console: Console) -> None:
    """Prints the figures to ``out``, progress to ``console``. Raises ``NeoError``."""
    percentiles = _check(flags)
    line = uvloop.run(_run(flags, server, percentiles, console))
    print_figures(out, line, percentiles)
    if flags.save_result or flags.save_detailed:
        path = _save(flags, line)
        out.print(f"written to {path}", highlight=False, soft_wrap=True)
    if line["failed"]:
        raise NeoError(f"{line['failed']} requests failed, the first: {line['first_error']}")


def _check(flags: ServeFlags) -> list[float]:
    """The percentiles. Raises ``ConfigurationError``."""
    for name in ("request_rate", "burstiness"):
        if not getattr(flags, name) > 0.0:
            shown = name.replace("_", "-")
            raise ConfigurationError(f"--{shown} is {getattr(flags, name)}; it must be above 0")
    if (flags.dataset_path is None) != (flags.dataset_name == "random"):
        needs = "needs" if flags.dataset_path is None else "takes no"
        raise ConfigurationError(f"--dataset-name {flags.dataset_name} {needs} --dataset-path")
    if flags.backend == "openai-chat" and flags.dataset_name != "jsonl":
        raise ConfigurationError(
            f"--backend openai-chat needs texts, --dataset-name jsonl; it is {flags.dataset_name}"
        )
    try:
        percentiles = [float(one) for one in flags.metric_percentiles.split(",")]
        if not all(0.0 <= one <= 100.0 for one in percentiles):
            raise ValueError("it must be from 0 to 100")
    except ValueError as error:
        raise ConfigurationError(
            f"--metric-percentiles is {flags.metric_percentiles!r}: {error}"
        ) from error
    return percentiles


async def _run(
    flags: ServeFlags, server: ServerFlags, percentiles: Sequence[float], console: Console
) -> dict[str, Any]:
    async with _target(flags, server) as target:
        jobs = _jobs(flags, target)
        for _ in range(flags.num_warmups):
            await _send(target, jobs[0], Record(), flags)
        with progress(console, f"{flags.backend} {target.model}", len(jobs)) as advance:
            begin = time.perf_counter()
            records = await _send_all(target, jobs, flags, advance)
            duration_s = time.perf_counter() - begin
        errors = [record.error for record in records if record.error is not None]
        line = {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "backend": flags.backend,
            "model_id": target.model,
            "num_prompts": len(jobs),
            "request_rate": "inf" if math.isinf(flags.request_rate) else flags.request_rate,
            "burstiness": flags.burstiness,
            "max_concurrency": flags.max_concurrency,
            "seed": flags.seed,
            **figures(records, duration_s, percentiles),
            "first_error": errors[0] if errors else None,
        }
        return line | (details(records) if flags.save_detailed else {})


def _target(flags: ServeFlags, server: ServerFlags) -> Target:
    if flags.backend == "grpc":
        return GrpcTarget(server.server, server.api_key, server.credentials())
    chat = flags.backend == "openai-chat"
    return HttpTarget(flags.base_url, server.api_key, server.ssl_ca_certs, chat=chat)


def _jobs(flags: ServeFlags, target: Target) -> list[Job]:
    if flags.dataset_name == "jsonl":
        assert flags.dataset_path is not None, "_check has seen it"
        jobs = jsonl_jobs(flags.dataset_path, flags.output_len, flags.num_prompts, flags.seed)
        if flags.backend == "openai-chat" and not all(isinstance(job.prompt, str) for job in jobs):
            raise ConfigurationError(
                f"--backend openai-chat needs texts; {flags.dataset_path} has token ids"
            )
        return jobs
    vocab_size = flags.vocab_size or target.vocab_size
    if vocab_size is None:
        raise ConfigurationError(
            f"--vocab-size is needed: the server does not say that of {target.model}"
        )
    return random_jobs(
        *(flags.dataset_path, flags.input_len, flags.output_len, flags.num_prompts),
        flags.random_range_ratio,
        vocab_size=vocab_size,
        max_model_len=target.max_model_len,
        seed=flags.seed,
    )


async def _send_all(
    target: Target, jobs: Sequence[Job], flags: ServeFlags, advance: Callable[[], None]
) -> list[Record]:
    """Sends each at its time, or when one of ``max_concurrency`` places is free after that."""
    places = asyncio.Semaphore(flags.max_concurrency or len(jobs))
    begin = time.perf_counter()

    async def one(job: Job, at_s: float) -> Record:
        await asyncio.sleep(begin + at_s - time.perf_counter())
        record = Record()
        async with places:
            try:
                await _send(target, job, record, flags)
            except NeoError as error:
                record.error = str(error)
        advance()
        return record

    times = send_times(len(jobs), flags.request_rate, flags.burstiness, flags.seed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(jobs, times, strict=True)]
    return [task.result() for task in tasks]


async def _send(target: Target, job: Job, record: Record, flags: ServeFlags) -> None:
    await target.send(job, record, temperature=flags.temperature, ignore_eos=flags.ignore_eos)
    if not record.times:
        raise NeoError("an answer had no token")
    record.num_output = record.num_output or len(record.times)


def _save(flags: ServeFlags, line: dict[str, Any]) -> Path:
    name = flags.result_filename
    if name is None:
        model = Path(line["model_id"]).name
        name = f"neo-{flags.backend}-{line['request_rate']}qps-{model}-{line['date']}.json"
    flags.result_dir.mkdir(parents=True, exist_ok=True)
    path = flags.result_dir / name
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return path
