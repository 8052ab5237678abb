"""`neo bench throughput` over the works of docs/benchmarks.md: `gpu-only` and `neo` side by side.

Random weights of the real shapes, a fixed GPU-cache, all requests at once. Works that share a model
and a GPU-cache run on one engine: first one of `gpu-only`, then one for each kind of CPU-cache. One
JSON line per work and engine as it comes, then a table, also when the time was up or Ctrl-C came.

    python scripts/bench_offload_table.py 8b-1000/100 8b-1000/200
    python scripts/bench_offload_table.py osc ac --data-dir DIRECTORY
    python scripts/bench_offload_table.py osc --each-of "--tpot-slo-ms 50" "--tpot-slo-ms 100"
    python scripts/bench_offload_table.py 8b-1000/100 -- --enforce-eager
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-m", "neo_server", "bench", "throughput")
LAST_LINES = 20  # of what a process that failed had logged
COLUMNS = (
    "| work | policy, CPU-cache | requests/s | over gpu-only | output tokens/s | mean TPOT, ms |"
    " TPOT p50 / p99, ms (requests): GPU-requests | CPU-requests | of both kinds |"
    " GPU busy | CPU busy | iterations |"
)
PLACES = ("gpu_requests", "cpu_requests", "gpu_and_cpu_requests")


@dataclass(frozen=True)
class Work:
    """Requests, and the machine that they are squeezed into."""

    model: str
    blocks: int  # of the GPU-cache, 16 tokens each
    max_model_len: int
    num_prompts: int
    lengths: tuple[int, int] = (0, 0)  # of prompt and output; unless it is a trace
    trace: str = ""  # file of --data-dir

    def sweep(self, data: Path | None, num_prompts: int | None) -> str:
        """As `--sweep` takes it. ``num_prompts``: in place of the work's own."""
        count = num_prompts or self.num_prompts
        if not self.trace:
            return f"{self.lengths[0]}/{self.lengths[1]}:{count}"
        if data is None or not (data / self.trace).is_file():
            raise SystemExit(f"--data-dir is {data}; it must be a directory that has {self.trace}")
        return f"{data / self.trace}:{count}"


@dataclass(frozen=True)
class Engine:
    """How one process differs from the others that run the same works."""

    policy: str
    kv: str  # kind of the CPU-cache
    flags: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """In the table."""
        if self.policy == "gpu-only":
            return self.policy
        return " ".join((f"{self.policy}, {self.kv}", *self.flags))


def works() -> dict[str, Work]:
    """By the names of the command line."""
    found = {
        "osc": Work("Llama-2-7B", 54, 832, 300, trace="osc-Llama-2-7b-hf.json"),
        "ac": Work("Llama-3.1-8B", 1650, 8192, 300, trace="AzureLLMInferenceTrace_code.csv"),
    }
    for output in (50, 100, 200, 300, 400):
        prompts = 400 if output <= 200 else 300
        found[f"8b-1000/{output}"] = Work("Llama-3.1-8B", 1650, 2048, prompts, (1000, output))
    return found


def engines(options: argparse.Namespace) -> list[Engine]:
    """In the order in which they run."""
    flags = [tuple(shlex.split(text)) for text in options.each_of or [""]]
    others = [Engine(options.policy, kv, each) for kv in options.kinds for each in flags]
    return [Engine("gpu-only", options.kinds[0]), *others]


def groups(asked: Sequence[Work]) -> list[list[int]]:
    """Places in ``asked`` of the works that can share an engine."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, work in enumerate(asked):
        found.setdefault((work.model, work.blocks), []).append(place)
    return list(found.values())


def command(group: Sequence[Work], engine: Engine, options: argparse.Namespace) -> list[str]:
    """Of one process. A later flag of the same name wins."""
    longest = max(work.max_model_len for work in group)
    sweep = [work.sweep(options.data_dir, options.num_prompts) for work in group]
    return [
        *(*PROGRAM, options.model or group[0].model, "--load-format", "dummy"),
        *("--temperature", "0", "--num-gpu-blocks-override", str(group[0].blocks)),
        *("--max-model-len", str(longest), "--dtype", options.dtype, "--device", options.device),
        *("--scheduling-policy", engine.policy, "--cpu-kv-cache-dtype", engine.kv),
        *("--kv-offloading-size", str(options.kv_offloading_size), *options.flags, *engine.flags),
        *(word for one in sweep for word in ("--sweep", one)),
    ]


def start(words: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One process; gives the line of each work that was over in time."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=None if options.verbose else said, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        limit = threading.Timer(options.timeout, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            status = process.wait()
        finally:
            if process.poll() is None:  # interrupted: it ends its workers, or the limit ends it
                process.terminate()
                process.wait()
            limit.cancel()
        if status:
            print(f"status {status}: {shlex.join(words)}", file=sys.stderr)
            said.seek(0)
            sys.stderr.writelines(said.readlines()[-LAST_LINES:])


def row(name: str, engine: Engine, line: dict[str, Any]) -> str:
    """Of the table."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in line["iterations"].items() if count)
    ratio = f"{line['relative']:.2f}" if "relative" in line else ""
    cells = (
        *(name, engine.title, f"{line['requests_per_s']:.2f}", ratio),
        *(f"{line['output_tokens_per_s']:.0f}", f"{1e3 * (line['mean_tpot_s'] or 0.0):.1f}"),
        *(spread(line["latencies"][place]) for place in PLACES),
        *(f"{line['gpu_busy_share']:.2f}", f"{line['cpu_busy_share']:.2f}", kinds),
    )
    return "| " + " | ".join(cells) + " |"


def spread(latencies: dict[str, Any]) -> str:
    """TPOT of some requests in ms, and how many they are."""
    p50, p99 = latencies["p50_tpot_s"], latencies["p99_tpot_s"]
    return "" if p50 is None else f"{1e3 * p50:.1f} / {1e3 * p99:.1f} ({latencies['num_requests']})"


@dataclass(frozen=True)
class Run:
    """One process."""

    works: list[int]  # places among those asked for, in the order of the sweep
    engine: Engine
    words: list[str]


def runs(options: argparse.Namespace) -> list[Run]:
    """All processes, in their order."""
    asked = [works()[name] for name in options.works]
    return [
        Run(group, engine, command([asked[place] for place in group], engine, options))
        for group in groups(asked)
        for engine in engines(options)
    ]


def measure(each: Sequence[Run], options: argparse.Namespace, table: dict[Any, str]) -> None:
    """Prints the lines and fills the table's rows, by what sorts them."""
    base: dict[int, float] = {}  # of gpu-only, by work
    for order, one in enumerate(each):
        for line, place in zip(start(one.words, options), one.works, strict=False):
            if one.engine.policy == "gpu-only":
                base[place] = line["requests_per_s"]
            if place in base:
                line["relative"] = line["requests_per_s"] / base[place]
            name = options.works[place]
            line |= {"work": name, "flags": one.engine.flags}
            table[place, order] = row(name, one.engine, line)  # first: what is seen is in the table
            print(json.dumps(line), flush=True)


def arguments(words: list[str]) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("works", nargs="+", choices=list(works()), metavar="WORK",
                        help=", ".join(works()))  # fmt: skip
    parser.add_argument("--data-dir", type=Path, help="where the traces are")
    parser.add_argument("--kinds", nargs="+", default=["int8", "auto"], help="of the CPU-cache")
    parser.add_argument("--model", help="a directory, in place of the works' own shapes")
    parser.add_argument("--policy", default="neo", help="beside gpu-only")
    parser.add_argument("--each-of", nargs="+", metavar="FLAGS",
                        help="an engine of that policy with each of these flags")  # fmt: skip
    parser.add_argument("--num-prompts", type=int, help="fewer than the works have")
    parser.add_argument("--kv-offloading-size", type=float, default=24.0, help="GiB")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout", type=float, default=600.0,
                        help="seconds of one process, for all works of its engine")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show what the processes log")
    parser.add_argument("flags", nargs="*", help="after --: further flags of neo bench throughput")
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.flags = words[at + 1 :]
    return options


def main() -> None:
    """Command line; exit status 1 when a work gave no figures on an engine."""
    options = arguments(sys.argv[1:])
    each = runs(options)
    table: dict[Any, str] = {}
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        measure(each, options, table)
    finally:
        rows = [table[key] for key in sorted(table)]
        print("\n".join((COLUMNS, "| --- | --- |" + " ---: |" * 9 + " --- |", *rows)), flush=True)
    sys.exit(len(table) < sum(len(one.works) for one in each))


if __name__ == "__main__":
    main()
