"""`scripts/soak_serving.py`: 256 streams at once on the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.server import REPO, running_server

STREAMS = 256
# The GPU-cache holds about half of the requests, the CPU-cache the others.
FLAGS = (
    *("--max-model-len", "128", "--max-num-seqs", str(STREAMS), "--cpu-attn-workers", "1"),
    *("--num-gpu-blocks-override", "512", "--kv-offloading-size", "0.75"),
)
# A CPU-request is left out of 32 iterations in a row at most (--max-skipped-iterations); streams
# that have ended meanwhile make a round of a gap larger than an iteration.
MOST_ROUNDS = 64
LONG = ("--bound-health-s", "1", "--bound-growth-mib", "32")


@pytest.mark.parametrize(
    ("policy", "seconds", "max_tokens", "bounds"),
    [
        ("mixed", 5, 6, ()),
        pytest.param(
            *("neo", 600, 48, LONG),
            marks=[pytest.mark.soak, pytest.mark.timeout(1800)],
            id="ten minutes",
        ),
    ],
)
def test_no_stream_starves_health_answers_and_memory_is_flat(
    demo_model: Path,
    tmp_path: Path,
    policy: str,
    seconds: int,
    max_tokens: int,
    bounds: tuple[str, ...],
) -> None:
    flags = (*FLAGS, "--scheduling-policy", policy)
    with running_server(demo_model, tmp_path, *flags) as server:
        command = [sys.executable, str(REPO / "scripts" / "soak_serving.py"), server.address]
        command += ["--streams", str(STREAMS), "--seconds", str(seconds)]
        command += ["--max-tokens", str(max_tokens), "--bound-rounds", str(MOST_ROUNDS), *bounds]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPO), *sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["requests"] >= STREAMS
        server.assert_caches_end_empty()
        loads = server.loads()
        assert loads.num_output_tokens == found["tokens"]
        assert loads.num_gpu_decodes > 0
        assert policy == "neo" or loads.num_cpu_decodes > 0
    print(done.stdout.splitlines()[-1])
