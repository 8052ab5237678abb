"""Latency of hand-overs between two processes: rings and doorbells, spinning and sleeping.

One way: from before the ring (or publish) in one process to after the wait in the other, by a clock
that both read. Both directions are measured; so is the round trip.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from neo_native import Array, make_geometry, probe_bells, probe_rings, segments

SPIN_US = 1_000_000  # longer than any hand-over: never sleeps
GAP_US = 300  # longer than it takes to fall asleep
WARM_UP = 1_000
_GEOMETRY = {
    **{"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "block_size": 16},
    **{"page_size": 16, "n_pages": 1, "max_slots": 1, "max_rows": 1, "max_tokens": 1},
    **{"max_blocks": 1, "max_pages": 1, "max_tasks": 1, "n_plans": 4, "max_workers": 1},
}


def play(attached: segments.SegmentSet, what: str, n: int, *, ping: bool, sleep: bool) -> Any:
    """One side of one game; one-way times of what it received and round trips, nanoseconds."""
    spin_us, gap_us = (0, GAP_US) if sleep else (SPIN_US, 0)
    geometry = attached.geometry
    if what == "ring":
        return probe_rings(
            attached.steps, attached.results, geometry, ping, n, spin_us, gap_us, 30.0
        )
    return probe_bells(attached.work, geometry, ping, n, spin_us, gap_us, 30.0)


def run_on(core: int | None) -> None:
    """Pins this process."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def measure(what: str, n: int, sleep: bool, cores: list[int | None]) -> dict[str, Any]:
    """Starts pong, plays ping, merges both sides' times."""
    made = segments.create_all(make_geometry(**_GEOMETRY))
    command = [sys.executable, __file__, "--pong", made.location.instance_id, "--what", what]
    command += ["-n", str(n), *(["--sleep"] if sleep else [])]
    command += [] if cores[1] is None else ["--cores", str(cores[1])]
    pong = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        run_on(cores[0])
        back, round_trip = play(made, what, n, ping=True, sleep=sleep)
        output, _ = pong.communicate(timeout=60.0)
        there = np.frombuffer(output, np.uint64)
    finally:
        pong.kill()
        pong.wait()
        segments.unlink_all(made)
        made.close()
    warm = min(WARM_UP, n // 10)
    one_way = np.concatenate((there[warm:], back[warm:]))
    return {"what": what, "waiting": "sleep" if sleep else "spin", "n": n} | {
        f"{name}_{p}_us": round(float(np.percentile(times, q)) / 1000, 3)
        for name, times in (("one_way", one_way), ("round_trip", round_trip[warm:]))
        for p, q in (("p50", 50.0), ("p99", 99.0), ("p999", 99.9))
    }


def pong_main(arguments: argparse.Namespace) -> None:
    """The child: plays pong, writes its one-way times to stdout."""
    run_on(arguments.cores[0] if arguments.cores else None)
    attached = segments.attach_all(arguments.pong)
    times: Array
    times, _ = play(attached, arguments.what, arguments.n, ping=False, sleep=arguments.sleep)
    sys.stdout.buffer.write(times.tobytes())
    attached.close()


def choose_cores(given: list[int] | None) -> list[int | None]:
    """Two cores, or no pinning where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    if given:
        if len(given) != 2:
            raise SystemExit(f"--cores has {len(given)} entries; it must have 2")
        return [*given]
    return [*usable[-2:]] if len(usable) > 1 else [None, None]


def machine() -> str:
    """For the report: processor, cores, load."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = Path("/proc/loadavg").read_text().split()[0]
    return f"{model}, {len(os.sched_getaffinity(0))} cores, load average {load}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100_000, help="round trips when spinning")
    parser.add_argument("--sleeping-n", type=int, default=5_000, help="round trips when sleeping")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best is shown")
    parser.add_argument("--cores", type=lambda text: [int(c) for c in text.split(",")])
    parser.add_argument("--json", action="store_true", help="one line per configuration")
    parser.add_argument("--pong", help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("ring", "doorbell"), help=argparse.SUPPRESS)
    parser.add_argument("--sleep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pong:
        pong_main(arguments)
        return
    cores = choose_cores(arguments.cores)
    before = machine()
    if not arguments.json:
        print(f"{before}; cores {cores}; best p50 of {arguments.repeat} runs, microseconds")
        print(f"{'':18}{'one way p50':>12}{'p99':>9}{'p99.9':>9}{'round trip p50':>16}{'p99':>9}")
    for what in ("doorbell", "ring"):
        for sleep in (False, True):
            n = arguments.sleeping_n if sleep else arguments.n
            runs = [measure(what, n, sleep, cores) for _ in range(arguments.repeat)]
            best = min(runs, key=lambda run: float(run["one_way_p50_us"]))
            if arguments.json:
                print(json.dumps({**best, "machine": before, "cores": cores}))
                continue
            print(
                f"{what:9}{best['waiting']:9}{best['one_way_p50_us']:12.3f}"
                f"{best['one_way_p99_us']:9.3f}{best['one_way_p999_us']:9.3f}"
                f"{best['round_trip_p50_us']:16.3f}{best['round_trip_p99_us']:9.3f}"
            )


if __name__ == "__main__":
    main()
