"""Names, creation, attachment, removal and liveness locks of the shared-memory segments.

A segment of instance ``ab12`` is the POSIX shared-memory object ``/neo-ab12-KIND``, or the file
``SHM_DIR/neo-ab12-KIND`` when another tmpfs is configured. The server creates and unlinks them;
whoever attaches never unlinks.

Liveness is a lock, not a clock (locks.py): every process holds one byte of the control segment.
`SERVER_BYTE`, `gpu_worker_byte` and `cpu_worker_byte` name the bytes.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import posix_ipc

from neo_native._core import Array, Control, Segment, SegmentKind
from neo_native.location import Location, SegmentsError
from neo_native.locks import (
    SERVER_BYTE,
    cpu_worker_byte,
    gpu_given_up_byte,
    gpu_worker_byte,
    is_locked,
    try_lock,
    unlock,
)

__all__ = [
    "KINDS",
    "SERVER_BYTE",
    "Location",
    "SegmentSet",
    "SegmentsError",
    "attach_all",
    "clear_dead_workers",
    "cpu_worker_byte",
    "create_all",
    "gpu_given_up_byte",
    "gpu_worker_byte",
    "is_locked",
    "reclaim_dead",
    "try_lock",
    "unlink_all",
    "unlock",
]

KINDS: dict[str, SegmentKind] = {
    "control": SegmentKind.CONTROL,
    "steps": SegmentKind.STEPS,
    "results": SegmentKind.RESULTS,
    "sequences": SegmentKind.SEQUENCES,
    "work": SegmentKind.WORK,
    "exchange": SegmentKind.EXCHANGE,
    "cpu_cache": SegmentKind.CPU_CACHE,
}
# Unlinked in this order: while any segment is left, so is the control segment that says whose.
_UNLINK_ORDER = ["timeline", *(kind for kind in KINDS if kind != "control"), "control"]
_NAME = re.compile(r"neo-([A-Za-z0-9]{1,32})-control")
_POSIX_DIR = Path("/dev/shm")  # where Linux shows POSIX shared memory; used to list, never to open


class SegmentSet:
    """All segments of one instance, mapped, and the descriptors that its locks need.

    `fd` holds this process's lock; `probe_fd` is another open file description of the same
    segment, through which the locks of others (and our own) can be seen.
    """

    def __init__(self, location: Location, fd: int, segments: dict[str, Segment]) -> None:
        self.location = location
        self.fd = fd
        self.probe_fd = location.open("control")
        self.control = segments["control"]
        self.steps = segments["steps"]
        self.results = segments["results"]
        self.sequences = segments["sequences"]
        self.work = segments["work"]
        self.exchange = segments["exchange"]
        self.cpu_cache = segments["cpu_cache"]
        self.geometry: Array = Control(self.control).geometry

    def try_lock(self, byte: int) -> bool:
        """Makes this process the live holder of `byte`."""
        return try_lock(self.fd, byte)

    def is_locked(self, byte: int) -> bool:
        """Whether some process, this one included, is the live holder of `byte`."""
        return is_locked(self.probe_fd, byte)

    def close(self) -> None:
        """Gives up the locks. Mappings end with their last view."""
        for fd in (self.fd, self.probe_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.probe_fd = -1


def _lock_new_control(instance_id: str | None, shm_dir: str | None) -> tuple[Location, int]:
    """Creates a control segment (still empty) and holds its server byte.

    Between creation and lock a reclaiming server may take the file for a dead one's: then either
    the lock fails or the name is gone, and another id is tried.
    """
    for _ in range(16):
        location = Location(instance_id or secrets.token_hex(4), shm_dir)
        fd = location.open("control", create=True)
        if try_lock(fd, SERVER_BYTE) and _leads_to(location, fd):
            return location, fd
        os.close(fd)
        if instance_id is not None:
            continue
    raise SegmentsError(f"could not keep a control segment (last tried {location.name('control')})")


def _leads_to(location: Location, fd: int) -> bool:
    try:
        other = location.open("control")
    except FileNotFoundError:
        return False
    try:
        return os.path.sameopenfile(fd, other)
    finally:
        os.close(other)


def create_all(
    geometry: Array,
    instance_id: str | None = None,
    shm_dir: str | None = None,
    populate_threads: int = 1,
) -> SegmentSet:
    """Creates every segment and locks the server byte. The server's.

    Raises SharedMemoryError when there is too little room, ValueError for a bad geometry and
    FileExistsError when an instance of that id exists; leaves nothing behind then.
    """
    location, fd = _lock_new_control(instance_id, shm_dir)
    try:
        segments = {}
        for name, kind in KINDS.items():
            segment_fd = fd if name == "control" else location.open(name, create=True)
            try:
                segments[name] = Segment.create(segment_fd, kind, geometry, populate_threads)
            finally:
                if name != "control":
                    os.close(segment_fd)
        return SegmentSet(location, fd, segments)
    except BaseException:
        _unlink_names(location)
        os.close(fd)
        raise


def attach_all(
    instance_id: str, shm_dir: str | None = None, *, cpu_cache_writable: bool = True
) -> SegmentSet:
    """Maps every segment of a running instance.

    Raises FileNotFoundError, SegmentsError (not ours) or LayoutMismatchError (another build).
    """
    location = Location(instance_id, shm_dir)
    fd = location.open("control")
    try:
        segments = {}
        for name, kind in KINDS.items():
            segment_fd = location.open(name)
            try:
                writable = cpu_cache_writable or name != "cpu_cache"
                segments[name] = Segment.attach(segment_fd, kind, writable)
            finally:
                os.close(segment_fd)
        return SegmentSet(location, fd, segments)
    except BaseException:
        os.close(fd)
        raise


def unlink_all(segments: SegmentSet) -> None:
    """Removes every name of the instance. Only the server, which created them."""
    _unlink_names(segments.location)


def _unlink_names(location: Location) -> None:
    for kind in _UNLINK_ORDER:
        location.unlink(kind)


def reclaim_dead(shm_dir: str | None = None) -> list[str]:
    """Unlinks the segments of our instances whose server is dead; returns their ids, sorted.

    Holds the dead server's byte meanwhile, so that two reclaimers, or a reclaimer and a server
    that is just starting, never both think they own the instance.
    """
    reclaimed = []
    for instance_id in _instances(shm_dir):
        location = Location(instance_id, shm_dir)
        try:
            fd = location.open("control")
        except (FileNotFoundError, PermissionError, posix_ipc.PermissionsError, SegmentsError):
            continue  # gone meanwhile, or another user's
        try:
            if try_lock(fd, SERVER_BYTE) and _leads_to(location, fd):
                _unlink_names(location)
                reclaimed.append(instance_id)
        finally:
            os.close(fd)
    return reclaimed


def _instances(shm_dir: str | None) -> list[str]:
    folder = Path(shm_dir) if shm_dir else _POSIX_DIR
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(match.group(1) for match in found if match)


def clear_dead_workers(segments: SegmentSet, control: Control) -> list[int]:
    """Empties the rows of cpu workers whose lock is free; returns them. The server's.

    Takes each row's lock while clearing, so that a worker that is just joining is not wiped.
    """
    cleared = []
    for row, entry in enumerate(control.worker_rows()):
        byte = cpu_worker_byte(row)
        if entry["state"] == 0 or not segments.try_lock(byte):
            continue
        try:
            control.clear_row(row)
            cleared.append(row)
        finally:
            unlock(segments.fd, byte)
    return cleared
