"""``python -m cpu_attn_worker --server HOST:PORT [--threads N] [--[no-]pin]``."""

from __future__ import annotations

import argparse
import logging
import sys

from cpu_attn_worker.worker import WorkerError, run
from neo_native import NativeError, logs


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Exits with status 2 and a message when an argument is wrong."""
    parser = argparse.ArgumentParser(prog="neo-cpu-attn-worker", description=__doc__)
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the server's gRPC")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="attention threads (default: the server's setting)"
    )
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="lease a core for each thread (default: as the server says)",
    )
    parser.add_argument(
        "--reserved-cores",
        type=int,
        metavar="N",
        help="pin nothing to the first N usable cores (default: as the server says)",
    )
    parser.add_argument("--spawned", action="store_true", help="started by the server: die with it")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)  # tests: fault.hpp
    args = parser.parse_args(argv)
    if args.threads is not None and not 1 <= args.threads <= 512:
        parser.error(f"--threads is {args.threads}; it must be from 1 to 512")
    if args.reserved_cores is not None and args.reserved_cores < 0:
        parser.error(f"--reserved-cores is {args.reserved_cores}; it must be at least 0")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 after leaving in order, 1 when it could not join."""
    args = parse_args(argv)
    logs.configure("cpu_attn_worker")
    try:
        run(
            args.server,
            args.threads,
            args.fault,
            pin=args.pin,
            reserved_cores=args.reserved_cores,
            spawned=args.spawned,
        )
    except (WorkerError, NativeError, OSError, ValueError) as error:
        logging.getLogger("cpu_attn_worker").error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
