"""TLS, Unix domain sockets and keepalive of the public ports."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import time
from pathlib import Path

import grpc
import httpx
import pytest

from neo_server import probe
from neo_server.errors import ConfigurationError
from neo_server.options import Options
from neo_server.tls import Tls
from neo_server.unix_socket import claim, socket_path
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import Process, request_of, tokens_of

KEYS = Path(__file__).resolve().parents[2] / "data" / "tls"
PAIR = ("--ssl-certfile", str(KEYS / "cert.pem"), "--ssl-keyfile", str(KEYS / "key.pem"))
BODY = {"prompt": [1, 2], "max_tokens": 5, "seed": 3, "ignore_eos": True}


def served(channel: grpc.Channel) -> list[int]:
    return tokens_of(rpc.InferenceStub(channel).Generate(request_of([1, 2], 5, 3), timeout=30.0))


def test_with_a_certificate_both_ports_are_encrypted(tiny_model: Path, tmp_path: Path) -> None:
    process = Process(tiny_model, tmp_path, "--http-port", "0", *PAIR)
    try:
        process.worker()
        process.until(process.address_file.exists)
        address, _, http = process.address_file.read_text().split()
        with pytest.raises(grpc.RpcError) as caught:
            served(process.channel)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        root = (KEYS / "cert.pem").read_bytes()
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(root)) as channel:
            assert served(channel) == generate(3, [1, 2], 5)
            info = rpc.InferenceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
            assert info.uses_tls
        assert probe.main([address, "--ssl-ca-certs", PAIR[1], "--ssl-name", "localhost"]) == 0
        assert probe.main([address]) == 1
        trust = ssl.create_default_context(cafile=str(KEYS / "cert.pem"))
        with httpx.Client(verify=trust, trust_env=False) as client:
            reply = client.post(f"https://{http}/v1/completions", json=BODY)
            assert reply.json()["usage"]["completion_tokens"] == 5
            with pytest.raises(httpx.RemoteProtocolError):
                client.get(f"http://{http}/health")
        with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError):
            client.get(f"https://{http}/health")  # nobody has signed it
    finally:
        process.close()


@pytest.mark.parametrize(
    ("certfile", "keyfile", "words"),
    [
        ("cert.pem", None, "--ssl-certfile is given and --ssl-keyfile is not"),
        (None, "key.pem", "--ssl-keyfile is given and --ssl-certfile is not"),
        ("cert.pem", "other_key.pem", "key values mismatch"),
        ("cert.pem", "missing.pem", "No such file"),
        ("README.md", "key.pem", "README.md"),
    ],
)
def test_a_certificate_that_cannot_work_is_refused_at_the_start(
    certfile: str | None, keyfile: str | None, words: str
) -> None:
    options = Options(
        model="tiny",
        ssl_certfile=KEYS / certfile if certfile else None,
        ssl_keyfile=KEYS / keyfile if keyfile else None,
    )
    with pytest.raises(ConfigurationError, match=words):
        Tls.of(options)


@pytest.mark.parametrize("tls", [False, True])
def test_unix_domain_sockets_of_both_protocols(tiny_model: Path, tmp_path: Path, tls: bool) -> None:
    paths = [tmp_path / name for name in ("grpc.sock", "http.sock", "control.sock")]
    for path in paths:  # a server that was killed has left its own
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    flags = ("--host", f"unix://{paths[0]}", "--uds", str(paths[1]))
    flags += ("--control-host", f"unix://{paths[2]}", "--cpu-attn-workers", "1")
    process = Process(tiny_model, tmp_path, *flags, *(PAIR if tls else ()))
    try:
        process.worker()
        process.until(process.address_file.exists)
        words = process.address_file.read_text().split()
        assert words == [f"unix://{paths[i]}" for i in (0, 2, 1)]
        root = (KEYS / "cert.pem").read_bytes()
        name = [("grpc.ssl_target_name_override", "localhost")]
        channel = (
            grpc.secure_channel(words[0], grpc.ssl_channel_credentials(root), name)
            if tls
            else process.channel
        )
        assert served(channel) == generate(3, [1, 2], 5)
        stub = rpc.InferenceStub(channel)
        process.until(lambda: len(stub.GetServerInfo(pb.GetServerInfoRequest()).workers) == 2)
        trust = ssl.create_default_context(cafile=str(KEYS / "cert.pem"))
        transport = httpx.HTTPTransport(uds=str(paths[1]), verify=trust)
        with httpx.Client(transport=transport) as client:
            url = f"http{'s' * tls}://localhost/v1/completions"
            reply = client.post(url, json=BODY)
            assert reply.json()["usage"]["completion_tokens"] == 5
        channel.close()
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20.0) == 0
        assert [path for path in paths if path.exists()] == []
    finally:
        process.close()


def test_a_path_is_taken_over_only_from_a_dead_server(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    claim(path)
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(ConfigurationError, match="another server does"):
            claim(path)
    assert stat.S_ISSOCK(path.stat().st_mode)
    claim(path)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="no socket"):
        claim(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigurationError, match="has 200 bytes; it must have <= 107"):
        claim(Path("/" + "x" * 199))


def test_hosts_that_are_sockets() -> None:
    assert socket_path("127.0.0.1") is socket_path("::1") is None
    assert socket_path("unix:///run/neo.sock") == Path("/run/neo.sock")
    assert socket_path("unix:neo.sock") == Path.cwd() / "neo.sock"
    for wrong in ("unix:", "unix://neo.sock"):
        with pytest.raises(ConfigurationError, match="unix:///absolute/path"):
            socket_path(wrong)
    assert Options("m", host="unix:///a", http_port=8000).http_target == ("127.0.0.1", 8000)
    assert Options("m", host="10.0.0.1", http_port=8000).http_target == ("10.0.0.1", 8000)
    assert Options("m", http_host="unix:///a").http_target == ("unix:///a", 0)
    assert Options("m", uds=Path("/b")).http_target == ("unix:///b", 0)
    assert Options("m").http_target is None


# Seconds between pings, and how long the prefill takes. gRPC's own limit ends the stream on the
# third ping.
@pytest.mark.parametrize(
    ("period_s", "stall_s"), [(1.0, 6.0), pytest.param(10.0, 60.0, marks=pytest.mark.soak)]
)
def test_a_client_that_pings_through_a_long_prefill_is_answered(
    tiny_model: Path, tmp_path: Path, period_s: float, stall_s: float
) -> None:
    process = Process(tiny_model, tmp_path)
    try:
        process.worker()
        process.until(process.address_file.exists)
        options = [
            ("grpc.keepalive_time_ms", int(period_s * 1000)),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        with grpc.insecure_channel(process.address, options) as channel:
            os.kill(process.workers[0].pid, signal.SIGSTOP)  # the prefill of this request stands
            stub = rpc.InferenceStub(channel)
            stream = stub.Generate(request_of([1, 2], 5, 3), timeout=stall_s + 60.0)
            assert next(stream).HasField("prompt_info")
            time.sleep(stall_s)
            os.kill(process.workers[0].pid, signal.SIGCONT)
            assert tokens_of(stream) == generate(3, [1, 2], 5)
    finally:
        process.close()
