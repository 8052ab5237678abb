"""`scripts/soak_iterations.py`: requests by chance on a tiny model, in the real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_llama import make_checkpoint

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "iterations", [300, pytest.param(30_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_memory_does_not_grow_and_the_caches_end_empty(iterations: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    flags = ("--num-gpu-blocks", "200", "--kv-offloading-size", "0.05")
    command = [sys.executable, str(REPO / "scripts" / "soak_iterations.py")]
    done = subprocess.run(
        [*command, "--iterations", str(iterations), "--model", str(tmp_path), *flags],
        cwd=REPO, env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPO), *sys.path))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["iterations"].values()) >= iterations
    assert found["swap_outs"] > 0
    assert found["swap_ins"] > 0
    assert found["aborts"] > 0
