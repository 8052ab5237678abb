"""``python -m neo_server.probe [ADDRESS]``: status 0 while the server can serve.

A health check for containers and scripts that have no grpc-health-probe. ADDRESS is ``HOST:PORT``
of gRPC, whose health has to be SERVING, or a URL, which has to answer 200. Whose certificate an
``https`` URL shows is not checked: a probe asks its own machine, and sends nothing.
"""

from __future__ import annotations

import argparse
import ssl
import sys
import urllib.request
from urllib.error import URLError

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def trouble_of(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Why the server cannot serve; "" when it can."""
    if address.startswith(("http://", "https://")):
        return _trouble_over_http(address, timeout_s)
    try:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def _trouble_over_http(url: str, timeout_s: float) -> str:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as reply:
            return "" if reply.status == 200 else f"status {reply.status}"
    except (URLError, TimeoutError) as error:  # a status of 400 or above is a URLError too
        return str(error)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="neo_server.probe", description=__doc__)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="ADDRESS")
    address = parser.parse_args(argv).address
    trouble = trouble_of(address)
    if trouble:
        print(f"{address}: {trouble}", file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
