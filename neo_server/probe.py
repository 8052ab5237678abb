"""``python -m neo_server.probe [HOST:PORT]``: status 0 while the server's health is SERVING.

A health check for containers and scripts that have no grpc-health-probe.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def trouble_of(address: str, service: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """What grpc.health.v1 says unless it is SERVING; "" then."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        with grpc.insecure_channel(address) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as error:
        status = error if isinstance(error, grpc.Call) else None
        return str(error) if status is None else f"{status.code().name}: {status.details()}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="neo_server.probe", description=__doc__)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="default: the whole server")
    args = parser.parse_args(argv)
    trouble = trouble_of(args.address, args.service)
    if trouble:
        print(f"{args.address}: {trouble}", file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
