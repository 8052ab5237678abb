from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from neo_server.probe import main, trouble_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def served() -> Iterator[tuple[str, health.HealthServicer]]:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None).wait()


def test_the_status_is_what_health_says(
    served: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = served
    servicer.set("", NOT_SERVING)
    assert main([address]) == 1
    assert capsys.readouterr().err == f"{address}: NOT_SERVING\n"
    servicer.set("", SERVING)
    assert main([address]) == 0
    assert capsys.readouterr().err == ""


def test_an_unknown_service_and_a_server_that_is_not_there_are_named(
    served: tuple[str, health.HealthServicer],
) -> None:
    assert trouble_of(served[0], "nobody.Knows").startswith("NOT_FOUND")
    assert trouble_of("127.0.0.1:1", timeout_s=5.0).startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
