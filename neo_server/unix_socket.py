"""Addresses of the form ``unix:///path``, and taking over the path of a server that is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from neo_server.errors import ConfigurationError

_SCHEME = "unix:"
_LONGEST = 107  # bytes of a path in sockaddr_un, without the zero


def socket_path(host: str) -> Path | None:
    """The path of ``unix:///path`` (or gRPC's ``unix:path``); None for any other host."""
    if not host.startswith(_SCHEME):
        return None
    rest = host.removeprefix(_SCHEME)
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//"):
        raise ConfigurationError(f"host is {host!r}; it must be unix:///absolute/path")
    return Path(path).absolute()


def address_of(path: Path) -> str:
    """As gRPC clients take it."""
    return f"{_SCHEME}//{path}"


def claim(path: Path) -> None:
    """Removes the socket that a dead server has left. Raises ``ConfigurationError``."""
    length = len(os.fsencode(path))
    if length > _LONGEST:
        raise ConfigurationError(
            f"cannot listen on {path}: the path has {length} bytes; it must have <= {_LONGEST}"
        )
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigurationError(f"cannot listen on {path}: there is a file that is no socket")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {path}: {error}") from error
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {path}: {error}") from error
    raise ConfigurationError(f"cannot listen on {path}: another server does")
