"""Do many iterations of requests that come, go, swap and are aborted leave anything behind.

A model's shape with few layers and random weights, or a real model with ``--model``. Prints a JSON
line now and then; exit status 1 when a process or the device's memory grew by more than the bound
after the first fifth, or when a cache does not end empty.

    PYTHONPATH=. python scripts/soak_iterations.py --device cuda --dtype bfloat16

The policy is the one of the tests that places, swaps and preempts by chance; it lies under tests/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import uvloop

from neo_server.architectures import find, known
from neo_server.engine import Engine
from neo_server.launch import resolve
from neo_server.options import Options
from neo_server.request import Finish, OutputStream, SamplingParams, StopConditions
from neo_server.server import Server
from neo_server.state import ServerState

WARM = 0.2  # of the iterations: memory may grow until then
SAMPLES = 50  # of memory
IN_FLIGHT = 48  # requests
ABORTED = 0.15  # of the requests


class Ended(OutputStream):
    """A stream that nobody reads."""

    def __init__(self, over: asyncio.Event) -> None:
        super().__init__()
        self._ended = over

    def push(self, text: str, token_ids: object, finish: Finish | None = None) -> None:
        """See ``OutputStream``."""
        if finish is not None:
            self._ended.set()

    def fail(self, error: Exception) -> None:
        """See ``OutputStream``."""
        raise error


@dataclass
class Memory:
    """MiB by process and on the device, over time."""

    device: str
    samples: list[dict[str, float]] = field(default_factory=list)

    def sample(self, state: ServerState) -> dict[str, float]:
        """Now: anonymous memory of each process, and what the device has in use."""
        found = {"server": anonymous_mib("self"), "gpu_worker": anonymous_mib(str(state.gpu.pid))}
        for entry in state.memory.workers():
            found[f"cpu_worker {entry.row}"] = anonymous_mib(str(entry.pid))
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            found["device"] = (total - free) / 2**20
        self.samples.append(found)
        return found

    def growth(self) -> dict[str, float]:
        """The most of the second half over the most of the first, once warm."""
        warm = self.samples[int(len(self.samples) * WARM) :]
        first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        return {
            name: max(s[name] for s in second) - max(s.get(name, 0.0) for s in first)
            for name in warm[-1]
        }


def anonymous_mib(pid: str) -> float:
    """Memory of a process that is not shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon")


class Soak:
    """The traffic."""

    def __init__(self, options: argparse.Namespace, vocab_size: int) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._vocab_size = vocab_size
        self.memory = Memory(options.device)
        self.requests = self.aborts = 0

    async def run(self, state: ServerState, engine: Engine) -> dict[str, object]:
        """Until the iterations are done and everybody has ended."""
        metrics, begin = engine.scheduler.metrics, time.perf_counter()
        clients = [asyncio.create_task(self._client(engine)) for _ in range(IN_FLIGHT)]
        every = max(self._options.iterations // SAMPLES, 1)
        next_sample = 0
        while (done := sum(metrics.iterations.values())) < self._options.iterations:
            if done >= next_sample:
                sample = {k: round(v, 1) for k, v in self.memory.sample(state).items()}
                print(json.dumps({"iterations": done, "mib": sample}), flush=True)
                next_sample = done + every
            await first_failure(clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        blocks = engine.scheduler.blocks
        for _ in range(200):
            if not (blocks.blocks.used or blocks.pages.used):
                break
            await asyncio.sleep(0.05)
        return {
            "iterations": dict(metrics.iterations),
            "seconds": time.perf_counter() - begin,
            "requests": self.requests,
            "aborts": self.aborts,
            "swap_outs": metrics.num_swap_outs,
            "swap_ins": metrics.num_swap_ins,
            "preemptions": metrics.num_preemptions,
            "voided_rows": metrics.num_voided_rows,
            "gpu_blocks_left": blocks.blocks.used,
            "cpu_pages_left": blocks.pages.used,
            "growth_mib": {k: round(v, 1) for k, v in self.memory.growth().items()},
        }

    async def _client(self, engine: Engine) -> None:
        longest = min(engine.scheduler.max_tokens_per_sequence, 500)
        while True:
            over = asyncio.Event()
            n_prompt = self._random.randint(1, longest // 2)
            n_output = self._random.randint(1, longest // 2)
            prompt = [self._random.randrange(self._vocab_size) for _ in range(n_prompt)]
            self.requests += 1
            name = f"soak-{self.requests}"
            sampling = SamplingParams(seed=self.requests, temperature=self._random.choice((0, 1)))
            stop = StopConditions(max_tokens=n_output)
            engine.submit(name, prompt, sampling, stop, Ended(over))
            try:
                impatient = self._random.random() < ABORTED
                async with asyncio.timeout(self._random.random() if impatient else None):
                    await over.wait()
            except TimeoutError:
                self.aborts += 1
            finally:
                engine.abort(name)


async def first_failure(clients: list[asyncio.Task[None]]) -> None:
    """A pause, cut short by a client that failed: raises what it raised."""
    ended, _ = await asyncio.wait(clients, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
    for client in ended:
        client.result()


def few_layers(shape: str, layers: int) -> Path:
    """A directory with the ``config.json`` of a named model, cut short."""
    found = find(shape)
    if found is None:
        raise SystemExit(f"--shape is {shape}; known are {', '.join(known())}")
    fields = json.loads((found / "config.json").read_text(encoding="utf-8"))
    fields["num_hidden_layers"] = layers
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=50_000)
    parser.add_argument("--shape", choices=known(), default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", help="a local Hugging Face directory, in place of a shape")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--scheduling-policy", default="tests.helpers.policies:churn")
    parser.add_argument("--num-gpu-blocks", type=int, default=400)
    parser.add_argument("--kv-offloading-size", type=float, default=1.0, help="GiB")
    parser.add_argument("--bound", type=float, default=32.0, help="MiB of growth")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    options = Options(
        model=arguments.model or str(few_layers(arguments.shape, arguments.layers)),
        load_format="auto" if arguments.model else "dummy",
        skip_tokenizer_init=True,
        control_port=0,
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        device=arguments.device,
        dtype=arguments.dtype,
        scheduling_policy=arguments.scheduling_policy,
        num_gpu_blocks_override=arguments.num_gpu_blocks,
        kv_offloading_size=arguments.kv_offloading_size,
    )
    resolved = resolve(options)
    soak = Soak(arguments, resolved.model.vocab_size)
    found = uvloop.run(Server(options, resolved).offline(soak.run))
    print(json.dumps(found))
    grew = max(soak.memory.growth().values()) > arguments.bound
    sys.exit(bool(grew or found["gpu_blocks_left"] or found["cpu_pages_left"]))


if __name__ == "__main__":
    main()
