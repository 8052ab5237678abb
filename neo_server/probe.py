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
from pathlib import Path
from urllib.error import URLError

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def trouble_of(
    address: str,
    service: str = "",
    timeout_s: float = TIMEOUT_S,
    ca_certs: Path | None = None,
    name: str | None = None,
) -> str:
    """What grpc.health.v1 says unless it is SERVING; "" then.

    ``ca_certs``: PEM, of a server with TLS; ``name``: whose certificate it is, by default the
    address's. An address that is an ``http://`` or ``https://`` URL answers 200 when all is well;
    its certificate is not checked.
    """
    if address.startswith(("http://", "https://")):
        return _trouble_over_http(address, timeout_s)
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        with _channel(address, ca_certs, name) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def _channel(address: str, ca_certs: Path | None, name: str | None) -> grpc.Channel:
    if ca_certs is None:
        return grpc.insecure_channel(address)
    options = [] if name is None else [("grpc.ssl_target_name_override", name)]
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(ca_certs.read_bytes()), options
    )


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
    parser.add_argument("--service", default="", help="default: the whole server")
    parser.add_argument("--ssl-ca-certs", type=Path, help="PEM; the server has TLS")
    parser.add_argument("--ssl-name", help="of the certificate; default: the address's host")
    args = parser.parse_args(argv)
    address = args.address
    trouble = trouble_of(address, args.service, ca_certs=args.ssl_ca_certs, name=args.ssl_name)
    if trouble:
        print(f"{address}: {trouble}", file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
