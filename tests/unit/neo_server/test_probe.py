from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from neo_server.probe import main, trouble_of

TLS = Path(__file__).resolve().parents[2] / "data" / "tls"
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


@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1:1/health"])
def test_a_server_that_is_not_there_is_in_trouble(address: str) -> None:
    assert trouble_of(address, timeout_s=5.0)


class Health(BaseHTTPRequestHandler):
    """Answers 200 at /health, 503 elsewhere."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_over_http_the_status_counts_and_the_certificate_does_not(scheme: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        if scheme == "https":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"{scheme}://127.0.0.1:{server.server_port}"
            assert main([f"{url}/health"]) == 0
            assert "503" in trouble_of(f"{url}/other")
        finally:
            server.shutdown()
            thread.join()
