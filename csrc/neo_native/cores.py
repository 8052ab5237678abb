"""Which cores this process may use: its affinity mask, its cgroup's limit, their NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")


def usable(root: Path = _ROOT) -> list[int]:
    """The cores of the affinity mask, ascending, at most as many as the cgroup may keep busy.

    Never empty. Every process with the same mask and limit gets the same list, so that the first
    of it can be kept free by all of them without talking. `root`: where ``proc`` and ``sys`` are.
    """
    mask = sorted(os.sched_getaffinity(0))
    limit = cgroup_limit(root)
    return mask if limit is None else mask[: max(1, int(limit))]


def leasable(reserved: int, root: Path = _ROOT) -> list[int]:
    """The usable cores but the first `reserved`; may be empty."""
    return usable(root)[reserved:]


def cgroup_limit(root: Path = _ROOT) -> float | None:
    """Cores that the cgroup's quota pays for; None: no quota. The tightest ancestor counts."""
    base = root / "sys/fs/cgroup"
    limits = [_quota_v2(folder) for folder in _ancestors(root, base)]
    limits.append(_quota_v1(base / "cpu"))
    found = [limit for limit in limits if limit is not None]
    return min(found, default=None)


def _ancestors(root: Path, base: Path) -> list[Path]:
    """The process's cgroup v2 folder and all above it, as far as they are visible."""
    text = _read(root / "proc/self/cgroup") or ""
    lines = [line.split("::", 1)[1] for line in text.splitlines() if line.startswith("0::")]
    folder = base / lines[0].lstrip("/") if lines else base
    # In a container the path may be the host's, of which only the own root is mounted.
    return [path for path in (folder, *folder.parents) if path.is_relative_to(base)]


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if quota is None or period is None or int(quota) < 0 else int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # missing, or not for us: then no limit is known
        return None


def by_node(cores: list[int], root: Path = _ROOT) -> list[list[int]]:
    """`cores` grouped by NUMA node, nodes ascending; one group where the system does not say."""
    groups = []
    left = set(cores)
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda path: int(path.name[4:])):
        group = left & set(parse_cpu_list(_read(folder / "cpulist") or ""))
        left -= group
        if group:
            groups.append(sorted(group))
    return [*groups, sorted(left)] if left else groups


def parse_cpu_list(text: str) -> list[int]:
    """``0-3,8`` as core numbers, the kernel's notation."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return cores
