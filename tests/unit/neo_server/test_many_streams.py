"""256 streams on the whole server with a fake gpu worker, as fast as a model on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.server_process import REPO, Process

STREAMS = 256
# Half of the requests fit in each cache, at their longest.
FLAGS = ("--max-num-seqs", str(STREAMS), "--num-gpu-blocks-override", "2048")
FLAGS += ("--kv-offloading-size", "0.016")
# Rounds of a gap: see the script. `mixed` leaves no request out, so a gap is an iteration; streams
# that are read late while others end make it look longer.
MOST_ROUNDS = 64


@pytest.mark.parametrize(
    ("seconds", "bounds"),
    [
        (5, ()),
        pytest.param(
            *(600, ("--bound-growth-mib", "16")),
            marks=[pytest.mark.soak, pytest.mark.timeout(1800)],
            id="ten minutes",
        ),
    ],
)
def test_no_stream_starves_health_answers_and_memory_is_flat(
    tiny_model: Path, tmp_path: Path, seconds: int, bounds: tuple[str, ...]
) -> None:
    process = Process(tiny_model, tmp_path, *FLAGS)
    try:
        process.worker("--plan-ms", "20")
        process.until(process.address_file.exists)
        command = [sys.executable, str(REPO / "scripts" / "soak_serving.py"), process.address]
        command += ["--streams", str(STREAMS), "--seconds", str(seconds)]
        command += ["--max-tokens", "200", "--bound-rounds", str(MOST_ROUNDS), *bounds]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPO), *sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        print(found)
        assert found["requests"] >= STREAMS
        assert process.loads().num_output_tokens == found["tokens"]
        assert process.loads().num_cpu_decodes > 0
        process.until(process.caches_are_empty)
    finally:
        process.close()
