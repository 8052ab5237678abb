"""Measures what a device can do at most: ``python -m neo_server.bench.device_rates``.

A process of its own, so that its memory, the CUDA context included, is free again before the gpu
worker starts. Prints a JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from neo_server.errors import NeoError
from neo_server.supervisor import python_path

_REPEATS = 7
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}  # far beyond the caches
_COPY_SHARE = 8  # of the free device memory; two buffers are needed
_MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of both factors
_CALLS = {"cuda": 10, "cpu": 1}  # between two readings of the clock
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured on the device, by the median of some repetitions."""

    bytes_per_s: float  # read and written by a copy within the device's memory
    flops: float  # two a multiply-add, of a square matrix product


def measure_rates(device: str, dtype: str) -> Rates:
    """In a process of its own. Raises ``NeoError`` with what that process said."""
    arguments = ["--device", device, "--dtype", dtype]
    command = [sys.executable, "-P", "-m", __name__, *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.SubprocessError as error:
        raise NeoError(f"measuring the device: {error}") from error
    return Rates(**json.loads(done.stdout))


def _measure(device: str, dtype: str) -> Rates:
    return Rates(_copy_rate(device), _product_rate(device, dtype))


def _copy_rate(device: str) -> float:
    import torch

    size = _COPY_BYTES[device]
    if device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // _COPY_SHARE)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _product_rate(device: str, dtype: str) -> float:
    import torch

    n = _MATRIX[device]
    left, right = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * n**3 / _seconds(lambda: torch.mm(left, right, out=out), device)


def _seconds(work: Callable[[], object], device: str) -> float:
    """Of one call. On CUDA several are enqueued at a time, so that launching one costs nothing."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(_REPEATS + 1):
        wait()
        begin = time.perf_counter()
        for _ in range(_CALLS[device]):
            work()
        wait()
        times.append((time.perf_counter() - begin) / _CALLS[device])
    return median(times[1:])  # the first warms up


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    _parser.add_argument("--device", choices=sorted(_MATRIX), required=True)
    _parser.add_argument("--dtype", required=True)
    _args = _parser.parse_args()
    print(json.dumps(asdict(_measure(_args.device, _args.dtype))))
