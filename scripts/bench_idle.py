"""CPU time that an idle server and its workers use, in percent of one core."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            parents[int(entry.name)] = int(stat[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name; ``None`` if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    stat = _stat(pid)
    return (int(stat[11]) + int(stat[12])) / TICKS_PER_S if stat else 0.0


def command_name(pid: int) -> str:
    """Module or program of a process."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a local Hugging Face directory")
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        command = [
            *(sys.executable, "-m", "neo_server", "serve", arguments.model),
            *("--port", "0", "--control-port", "0", "--address-file", str(address)),
        ]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not address.exists():
                if server.poll() is not None:
                    sys.exit(f"the server ended with exit code {server.returncode}")
                time.sleep(0.1)
            time.sleep(3.0)
            report(server.pid, arguments.seconds)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30.0)


def report(root: int, seconds: float) -> None:
    """Prints each process's share of a core and the sum."""
    pids = family(root)
    before = {pid: cpu_seconds(pid) for pid in pids}
    time.sleep(seconds)
    total = 0.0
    for pid in pids:
        share = 100 * (cpu_seconds(pid) - before[pid]) / seconds
        total += share
        print(f"{command_name(pid):24} {share:6.2f} %")
    print(f"{'together':24} {total:6.2f} % of one core over {seconds:.0f} s")


if __name__ == "__main__":
    main()
