"""What /proc says about processes."""

from __future__ import annotations

from pathlib import Path


def _stat(pid: int) -> list[str] | None:
    """Fields after the command's name: state, parent, ...; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_state(pid: int) -> str:
    """One letter as in ps(1); empty when the process is gone."""
    stat = _stat(pid)
    return stat[0] if stat else ""


def family(root: int) -> set[int]:
    """Pids of a process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, queue = set(), [root]
    while queue:
        pid = queue.pop()
        found.add(pid)
        queue += children.get(pid, [])
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of them that still run (a zombie does not)."""
    return {pid for pid in pids if process_state(pid) not in ("", "Z")}
