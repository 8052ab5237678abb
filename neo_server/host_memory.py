"""How much host memory a CPU-cache may take: what is free, and the size that ``auto`` means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neo_native import segments
from neo_server.errors import ConfigurationError

_ROOT = Path("/")
_GIB = 1 << 30
MEMORY_SHARE = 0.5  # of free memory; the rest is for the workers, the model's files and others
SHARED_SHARE = 0.9  # of the file system's free space, beside the other segments
CPU_DEVICE_BYTES = 1 << 30  # as the GPU-cache's default there (gpu_worker/kv_pool.py)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that are free now."""

    memory: int
    memory_source: str  # what says so
    shared: int | None  # of the file system that holds shared memory; None: it has no limit
    shared_source: str


@dataclass(frozen=True, slots=True)
class Need:
    """What is known of the server before its CPU-cache has a size; in bytes unless named so."""

    device: str
    page: int  # of one page over all layers
    pages: int  # with which every sequence has room at its longest
    pages_why: str
    other_segments: int


def auto_size(free: FreeMemory, need: Need) -> tuple[float, str]:
    """GiB of whole pages, and why: the tightest of what memory, files and sequences allow."""
    limits = [
        (
            int(free.memory * MEMORY_SHARE),
            f"{MEMORY_SHARE:.0%} of {_gib(free.memory)} of memory, {free.memory_source}",
        ),
        (need.pages * need.page, f"all that {need.pages_why} can fill"),
    ]
    if free.shared is not None:
        room = max(free.shared - need.other_segments, 0)
        why = f"{SHARED_SHARE:.0%} of {_gib(room)} that {free.shared_source} has left for it"
        limits.append((int(room * SHARED_SHARE), why))
    if need.device == "cpu":
        why = "with --device cpu, where the model and the GPU-cache lie in the same memory"
        limits.append((CPU_DEVICE_BYTES, f"at most {_gib(CPU_DEVICE_BYTES)} {why}"))
    size, why = min(limits)
    return size // need.page * need.page / _GIB, f"auto: {why}"


def parse_size(text: str) -> float | None:
    """A number of GiB, or ``auto`` (None). Raises ``ValueError``."""
    return None if text == "auto" else float(text)


def free_memory(shm_dir: Path | None, root: Path = _ROOT) -> FreeMemory:
    """Measures. Segments of dead servers are removed first: their memory is free too.

    ``root``: where ``proc`` and ``sys`` are.
    """
    segments.reclaim_dead(None if shm_dir is None else str(shm_dir))
    available = _table(root / "proc/meminfo", ":").get("MemAvailable")
    if available is None:
        raise ConfigurationError("--kv-offloading-size auto: /proc/meminfo has no MemAvailable")
    memory, source = available * 1024, "MemAvailable"
    limit = cgroup_free(root)
    if limit is not None and limit < memory:
        memory, source = limit, "the cgroup's limit less its use"
    folder = shm_dir or root / "dev/shm"
    return FreeMemory(memory, source, _free_space(folder), str(folder))


def cgroup_free(root: Path = _ROOT) -> int | None:
    """Bytes up to the tightest limit of the process's cgroups, v2 or v1; None: no limit."""
    found = [
        limit - (_number(folder / current) or 0) + _table(folder / "memory.stat", " ").get(file, 0)
        for folder, most, current, file in _cgroup_files(root)
        if (limit := _number(folder / most)) is not None
    ]
    return max(min(found), 0) if found else None


def _cgroup_files(root: Path) -> list[tuple[Path, str, str, str]]:
    """Folders up to the root of each hierarchy; names of limit, use and reclaimable file pages."""
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    files = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        folder = base / path.lstrip("/")
        # In a container the path may be the host's, of which only the own root is mounted.
        chain = [p for p in (folder, *folder.parents) if p.is_relative_to(base)]
        files += [(p, *(v2 if number == "0" else v1)) for p in chain]
    return files


def _free_space(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def _table(path: Path, separator: str) -> Mapping[str, int]:
    """``name<separator> number [unit]`` by line."""
    pairs = (line.partition(separator) for line in (_read(path) or "").splitlines())
    return {name: int(rest.split()[0]) for name, _, rest in pairs if rest.strip()}


def _number(path: Path) -> int | None:
    text = (_read(path) or "max").strip()
    return None if text == "max" else int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # missing, or not for us: then no limit is known
        return None


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
