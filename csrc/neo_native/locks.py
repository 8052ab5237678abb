"""Liveness as the kernel knows it: locks on bytes of the control segment's file.

Every process holds a write lock on one byte, owned by its open file description, which the kernel
drops when the process dies, however it dies and in whatever container. (A child made by ``fork``
without ``exec`` shares the description and would keep the lock; worker processes are therefore
started by ``exec``.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

SERVER_BYTE = 0
_GPU_WORKER_BYTES = 1
_CPU_WORKER_BYTES = 64
_GPU_GIVEN_UP_BYTES = 4096

_FLOCK = struct.Struct("hhxxxxqqixxxx")  # struct flock of 64-bit Linux


def gpu_worker_byte(rank: int) -> int:
    """The lock byte of the gpu worker of tensor-parallel rank `rank` (0 to 62)."""
    return _GPU_WORKER_BYTES + rank


def cpu_worker_byte(row: int) -> int:
    """The lock byte of the cpu worker in row `row` of the worker table."""
    return _CPU_WORKER_BYTES + row


def gpu_given_up_byte(rank: int) -> int:
    """Locked by the server: the gpu worker of `rank` did not answer, and has to leave."""
    return _GPU_GIVEN_UP_BYTES + rank


def try_lock(fd: int, byte: int) -> bool:
    """Locks one byte for `fd`'s open file description. False: another one holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, byte: int) -> None:
    """Gives up `try_lock`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether an open file description other than `fd`'s holds the byte."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return bool(kind != fcntl.F_UNLCK)
