"""`neo bench throughput` over the works of docs/benchmarks.md: `gpu-only` and `neo` side by side.

Random weights of the real shapes, a fixed GPU-cache, all requests at once. One JSON line per
policy as it comes, then a table.

    python scripts/bench_offload_table.py 8b-1000/100 8b-1000/200
    python scripts/bench_offload_table.py osc ac --data-dir DIRECTORY
    python scripts/bench_offload_table.py 8b-1000/100 -- --enforce-eager
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAST_LINES = 20  # of what a process that failed had logged
COLUMNS = (
    "| work | policy, CPU-cache | requests/s | over gpu-only | output tokens/s | mean TPOT, ms |"
    " GPU busy | CPU busy | iterations |"
)


@dataclass(frozen=True)
class Work:
    """Requests, and the machine that they are squeezed into."""

    model: str
    blocks: int  # of the GPU-cache, 16 tokens each
    max_model_len: int
    num_prompts: int
    lengths: tuple[int, int] = (0, 0)  # of prompt and output; unless it is a trace
    trace: str = ""  # file of --data-dir
    flags: tuple[str, ...] = field(default=())

    def arguments(self, data: Path | None, model: str | None) -> list[str]:
        """Of `neo bench throughput`; ``model``: in place of the work's own."""
        found = [
            *(model or self.model, "--load-format", "dummy", "--temperature", "0"),
            *("--num-gpu-blocks-override", str(self.blocks)),
            *("--max-model-len", str(self.max_model_len), "--num-prompts", str(self.num_prompts)),
            *self.flags,
        ]
        if not self.trace:
            return [
                *found,
                "--input-len",
                str(self.lengths[0]),
                "--output-len",
                str(self.lengths[1]),
            ]
        if data is None:
            raise SystemExit(f"--data-dir is needed for {self.trace}")
        return [*found, "--dataset-path", str(data / self.trace)]


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


def run(
    work: Work, options: argparse.Namespace, policies: str, kv: str
) -> Iterator[dict[str, Any]]:
    """One process for all ``policies``; gives a line of figures for each that ended in time."""
    command = [
        *(
            sys.executable,
            "-m",
            "neo_server",
            "bench",
            "throughput",
            *work.arguments(options.data_dir, options.model),
        ),
        *("--dtype", options.dtype, "--device", options.device, "--policies", policies),
        *("--cpu-kv-cache-dtype", kv, "--kv-offloading-size", str(options.kv_offloading_size)),
        *options.flags,
    ]
    if options.num_prompts:
        command += ["--num-prompts", str(options.num_prompts)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=None if options.verbose else said, text=True,
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
            limit.cancel()
        if status:
            print(f"status {status}: {' '.join(command)}", file=sys.stderr)
            said.seek(0)
            sys.stderr.writelines(said.readlines()[-LAST_LINES:])


def row(name: str, line: dict[str, Any], base: float | None) -> str:
    """Of the table."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in line["iterations"].items() if count)
    place = "" if line["policy"] == "gpu-only" else f", {line['cpu_kv_cache_dtype']}"
    ratio = f"{line['requests_per_s'] / base:.2f}" if base else ""
    cells = (
        *(name, line["policy"] + place, f"{line['requests_per_s']:.2f}", ratio),
        *(f"{line['output_tokens_per_s']:.0f}", f"{1e3 * (line['mean_tpot_s'] or 0.0):.1f}"),
        *(f"{line['gpu_busy_share']:.2f}", f"{line['cpu_busy_share']:.2f}", kinds),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Command line; exit status 1 when a policy gave no figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("works", nargs="+", choices=list(works()), metavar="WORK",
                        help=", ".join(works()))  # fmt: skip
    parser.add_argument("--data-dir", type=Path, help="where the traces are")
    parser.add_argument("--kinds", nargs="+", default=["int8", "auto"], help="of the CPU-cache")
    parser.add_argument("--model", help="a directory, in place of the work's own shape")
    parser.add_argument("--policy", default="neo", help="beside gpu-only")
    parser.add_argument("--num-prompts", type=int, help="fewer than the work has")
    parser.add_argument("--kv-offloading-size", type=float, default=24.0, help="GiB")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one process")
    parser.add_argument("--verbose", action="store_true", help="show what the processes log")
    parser.add_argument("flags", nargs="*", help="after --: further flags of neo bench throughput")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at])
    options.flags = arguments[at + 1 :]
    table, missing = [], False
    for name in options.works:
        base = None
        for i, kv in enumerate(options.kinds):
            policies = f"gpu-only,{options.policy}" if i == 0 else options.policy
            left = len(policies.split(","))
            for line in run(works()[name], options, policies, kv):
                left -= 1
                print(json.dumps({"work": name, **line}), flush=True)
                base = line["requests_per_s"] if line["policy"] == "gpu-only" else base
                table.append(row(name, line, base))
            missing |= left > 0
    print("\n".join((COLUMNS, "| --- | --- |" + " ---: |" * 6 + " --- |", *table)))
    sys.exit(missing)


if __name__ == "__main__":
    main()
