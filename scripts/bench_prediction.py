"""How well the cost model predicts a real run: the median error of iteration times.

    python scripts/bench_prediction.py MODEL

Serves MODEL with PyTorch on one core and a cpu-attention worker on the other, sends a stream of
requests under the policy ``mixed`` (every kind of row), and prints the median error of the latest
iterations and the corrections: after some 50 iterations from the machine's own profile, and after
some 200 from one that is wrong by 4x either way (every time in it multiplied).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

REPO = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 180.0


def scaled(table: Any, factor: float) -> Any:
    """A profile with every time multiplied."""
    if isinstance(table, dict):
        return {
            key: times(value, factor) if key == "seconds" else scaled(value, factor)
            for key, value in table.items()
        }
    return table


def times(value: Any, factor: float) -> Any:
    """Nested lists of seconds."""
    return [times(v, factor) for v in value] if isinstance(value, list) else value * factor


def iterations(loads: pb.GetLoadsResponse) -> int:
    """Of all kinds."""
    return sum(loads.iterations.values())


def send(stub: rpc.InferenceStub, number: int) -> None:
    """One request of random lengths."""
    rng = random.Random(number)
    request = pb.GenerateRequest(
        sampling_params=pb.SamplingParams(temperature=0.0),
        stop_conditions=pb.StopConditions(max_tokens=rng.randint(16, 48), ignore_eos=True),
    )
    request.token_ids.ids.extend(rng.randrange(1000) for _ in range(rng.randint(32, 256)))
    for _ in stub.Generate(request, timeout=300.0):
        pass


def measure(address: str, wanted: int) -> pb.GetLoadsResponse:
    """Sends requests until ``wanted`` iterations have run."""
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(8) as pool:
        stub = rpc.InferenceStub(channel)
        number = 0
        while iterations(stub.GetLoads(pb.GetLoadsRequest())) < wanted:
            list(pool.map(lambda n: send(stub, n), range(number, number + 8)))
            number += 8
        loads: pb.GetLoadsResponse = stub.GetLoads(pb.GetLoadsRequest())
        return loads


def run(model: Path, folder: Path, wanted: int, policy: str) -> pb.GetLoadsResponse:
    """A server for one measurement; ``folder`` holds the profiles."""
    address_file = folder / "address"
    command = [sys.executable, "-m", "neo_server", "serve", str(model), "--device", "cpu"]
    command += ["--port", "0", "--address-file", str(address_file), "--max-model-len", "1024"]
    command += ["--cpu-attn-workers", "1", "--cpu-attn-threads", "1"]
    command += ["--scheduling-policy", policy]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environment, cwd=REPO, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address_file.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {server.poll()}")
            time.sleep(0.1)
        return measure(address_file.read_text(encoding="utf-8").split()[0], wanted)
    finally:
        server.terminate()
        server.wait(60.0)


def show(title: str, loads: pb.GetLoadsResponse) -> None:
    """One line."""
    factors = ", ".join(f"{k} {v:.2f}" for k, v in sorted(loads.cost_corrections.items()))
    print(f"{title}: median error {loads.median_prediction_error:.1%} "
          f"after {iterations(loads)} iterations ({factors})")  # fmt: skip


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--policy", default="mixed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show("own profile", run(arguments.model, folder, 50, arguments.policy))
        (stored,) = (folder / "neo" / "profiles").glob("*.json")
        table = json.loads(stored.read_text(encoding="utf-8"))
        for factor in (4.0, 0.25):
            stored.write_text(json.dumps(scaled(table, factor)), encoding="utf-8")
            loads = run(arguments.model, folder, 200, arguments.policy)
            show(f"profile times {factor:g}", loads)


if __name__ == "__main__":
    main()
