"""Whether a worker process works: a health check for where workers are containers.

``python -m neo_native.probe [--pid 1]`` ends with status 0 when the process holds a worker's
liveness lock (locks.py) and, if it is a cpu-attention worker, shows a heartbeat. Everything is read
from ``/proc`` and from shared memory; neither the server nor the worker notices.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from neo_native._core import Control, NativeError, Segment, SegmentKind
from neo_native.location import Location
from neo_native.locks import cpu_worker_byte, gpu_worker_byte

SILENT_S = 5.0  # a cpu-attention worker's heart beats five times a second
_READY = 2  # WorkerState of protos/wire.hpp
_LOCK = re.compile(r"^lock:.*OFDLCK\s+ADVISORY\s+WRITE\s.*\s(\d+)\s+\1$", re.MULTILINE)
_CONTROL = re.compile(r"(.*)/neo-([A-Za-z0-9]{1,32})-control")
_POSIX_DIR = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Role:
    """A byte of an instance's control segment that a process holds."""

    location: Location
    byte: int


def role_of(pid: int, proc: Path = Path("/proc")) -> Role | None:
    """What the process is; None: no worker, or one that has not joined yet."""
    folder = proc / str(pid)
    for descriptor in sorted((folder / "fd").iterdir()):
        try:
            path = _CONTROL.fullmatch(str(descriptor.readlink()))
            text = (folder / "fdinfo" / descriptor.name).read_text(encoding="ascii")
        except FileNotFoundError:  # closed meanwhile
            continue
        bytes_held = [int(byte) for byte in _LOCK.findall(text)]
        held = [byte for byte in bytes_held if byte >= gpu_worker_byte(0)]
        if path is not None and held:
            shm_dir = None if path[1] == _POSIX_DIR else path[1]
            return Role(Location(path[2], shm_dir), held[0])
    return None


def check(role: Role, now_s: float) -> str:
    """What is wrong with the worker; "": nothing. ``now_s``: by ``time.monotonic``."""
    row = role.byte - cpu_worker_byte(0)
    if row < 0:  # a gpu worker; the server watches whether it answers
        return ""
    descriptor = role.location.open("control")
    try:
        control = Control(Segment.attach(descriptor, SegmentKind.CONTROL, False))
    finally:
        os.close(descriptor)
    entry = control.worker_rows()[row]
    age = now_s - float(entry["heartbeat_ns"]) * 1e-9
    if entry["state"] != _READY:
        return f"row {row} is in state {int(entry['state'])}; it must be {_READY}"
    if age > SILENT_S:
        return f"row {row}: the last heartbeat is {age:.1f} s old; at most {SILENT_S} are allowed"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="neo_native.probe", description=__doc__)
    parser.add_argument("--pid", type=int, default=1, help="of the worker (default: 1)")
    args = parser.parse_args(argv)
    try:
        role = role_of(args.pid)
        trouble = "no worker's lock is held" if role is None else check(role, time.monotonic())
    except (NativeError, OSError) as error:
        trouble = str(error)
    if trouble:
        print(f"process {args.pid}: {trouble}", file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
