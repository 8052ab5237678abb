"""The certificate of the public ports, checked before anything listens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from neo_server.errors import ConfigurationError
from neo_server.options import Options


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: a certificate chain and its private key."""

    certfile: Path
    keyfile: Path

    @staticmethod
    def of(options: Options) -> Tls | None:
        """None: the ports are not encrypted. Raises ``ConfigurationError``."""
        certfile, keyfile = options.ssl_certfile, options.ssl_keyfile
        if certfile is None and keyfile is None:
            return None
        if certfile is None or keyfile is None:
            given, other = (
                ("--ssl-certfile", "--ssl-keyfile")
                if keyfile is None
                else ("--ssl-keyfile", "--ssl-certfile")
            )
            raise ConfigurationError(f"{given} is given and {other} is not; TLS needs both")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, _no_password)
        except OSError as error:  # ssl.SSLError among them
            raise ConfigurationError(
                f"--ssl-certfile is {certfile} and --ssl-keyfile is {keyfile}: {error}"
            ) from error
        return Tls(certfile, keyfile)

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port."""
        pair = self.keyfile.read_bytes(), self.certfile.read_bytes()
        return grpc.ssl_server_credentials([pair])


def _no_password() -> str:
    """Without it OpenSSL would ask on the terminal; gRPC has no place for one."""
    raise ConfigurationError("--ssl-keyfile is encrypted; it must be a key without a password")
