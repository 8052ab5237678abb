"""Names of an instance's segments, and how they are opened and unlinked."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from neo_native._core import NativeError


class SegmentsError(NativeError):
    """Segments are missing, not ours, or in use; the message names them."""


@dataclass(frozen=True)
class Location:
    """Where the segments of one instance are."""

    instance_id: str
    shm_dir: str | None = None  # None or empty: POSIX shared memory

    @property
    def prefix(self) -> str:
        """What every name starts with; names are PREFIX-KIND."""
        return f"/neo-{self.instance_id}"

    def name(self, kind: str) -> str:
        """The POSIX name, or the path below `shm_dir`."""
        posix_name = f"{self.prefix}-{kind}"
        return self.shm_dir.rstrip("/") + posix_name if self.shm_dir else posix_name

    def open(self, kind: str, *, create: bool = False) -> int:
        """A new open file description, closed on exec.

        Raises FileExistsError, FileNotFoundError, or SegmentsError when the segment belongs to
        another user or is open to others.
        """
        name = self.name(kind)
        if self.shm_dir:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(name, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        else:
            fd = _open_posix(name, create)
        try:
            _check_owner(fd, name)
        except SegmentsError:
            os.close(fd)
            raise
        return fd

    def unlink(self, kind: str) -> None:
        """Removes the name; mappings live on. A missing name is not an error."""
        try:
            if self.shm_dir:
                Path(self.name(kind)).unlink()
            else:
                posix_ipc.unlink_shared_memory(self.name(kind))
        except (FileNotFoundError, posix_ipc.ExistentialError):
            pass


def _open_posix(name: str, create: bool) -> int:
    flags = posix_ipc.O_CREX if create else 0
    try:
        fd: int = posix_ipc.SharedMemory(name, flags, mode=0o600).fd
    except posix_ipc.ExistentialError as error:
        missing = FileExistsError if create else FileNotFoundError
        raise missing(f"shared memory {name}: {error}") from error
    os.set_inheritable(fd, False)
    return fd


def _check_owner(fd: int, name: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        raise SegmentsError(f"{name} belongs to user {info.st_uid}, not to {os.geteuid()}")
    if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SegmentsError(f"{name} has mode {stat.S_IMODE(info.st_mode):o}; it must be 600")
