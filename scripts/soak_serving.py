"""Many streams at once against a running server: gaps between tokens, health, memory.

    PYTHONPATH=. python scripts/soak_serving.py localhost:50051 --streams 256 --seconds 600

Prints a JSON line of memory now and then, and one of everything at the end. A gap is told in
seconds and in rounds: tokens that all streams got meanwhile, by the streams that were open, so
about the iterations that left the stream out. Exit status 1 when a bound that was given is
exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from protos.credentials import key_metadata

WARM = 0.2  # of the time: memory may grow until then
SAMPLES = 50  # of memory
HEALTH_EVERY_S = 0.5
HEALTH_TIMEOUT_S = 30.0


@dataclass
class Found:
    """What the clients saw."""

    tokens: int = 0
    requests: int = 0
    open: int = 0  # streams that have a token and are not over
    gaps_s: list[float] = field(default_factory=list)
    gaps_rounds: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    def growth_mib(self) -> dict[str, float]:
        """Median of the second half over that of the first, once warm: peaks come and go."""
        warm = self.memory[int(len(self.memory) * WARM) :]
        first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        if not first:
            return {}
        return {
            name: round(median(s[name] for s in second) - median(s[name] for s in first), 1)
            for name in warm[-1]
        }


async def stream(stub: rpc.InferenceStub, request: pb.GenerateRequest, found: Found) -> None:
    """One request to its end."""
    begin = last = time.perf_counter()
    seen, has_token = found.tokens, False
    try:
        async for message in stub.Generate(request, metadata=key_metadata()):
            count = len(message.delta.token_ids)
            if not count:
                continue
            now = time.perf_counter()
            if has_token:
                found.gaps_s.append(now - last)
                found.gaps_rounds.append((found.tokens - seen) / found.open)
            else:
                found.first_s.append(now - begin)
                found.open += 1
            has_token, last = True, now
            found.tokens += count
            seen = found.tokens
    finally:
        found.open -= has_token
    found.requests += 1


async def client(
    stub: rpc.InferenceStub, arguments: argparse.Namespace, index: int, end: float, found: Found
) -> None:
    """Requests, one after the other, until the time is over."""
    chance = random.Random(f"{arguments.seed} {index}")
    while time.perf_counter() < end:
        request = pb.GenerateRequest()
        count = chance.randint(8, arguments.max_prompt)
        request.token_ids.ids.extend(chance.randrange(3, 250) for _ in range(count))
        request.sampling_params.seed = chance.getrandbits(32)
        most = arguments.max_tokens
        request.stop_conditions.max_tokens = chance.randint(max(most // 4, 1), most)
        request.stop_conditions.ignore_eos = True
        await stream(stub, request, found)


async def watch_health(address: str, found: Found) -> None:
    """Asks on a connection of its own. Raises where the server does not serve."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            begin = time.perf_counter()
            request = health_pb2.HealthCheckRequest()
            status = (await stub.Check(request, timeout=HEALTH_TIMEOUT_S)).status
            found.health_s.append(time.perf_counter() - begin)
            if status != health_pb2.HealthCheckResponse.SERVING:
                raise RuntimeError("NOT_SERVING at full load")
            await asyncio.sleep(HEALTH_EVERY_S)


async def watch_memory(stub: rpc.InferenceStub, every_s: float, found: Found) -> None:
    """Memory that is not shared, of the server and its workers, where they run on this machine."""
    while True:
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=key_metadata())
        pids = {"server": info.pid}
        for worker in info.workers:
            pids[f"{pb.WorkerInfo.Kind.Name(worker.kind)} {worker.row}"] = worker.pid
        now = {}
        for name, pid in pids.items():
            with suppress(OSError):
                now[name] = anonymous_mib(pid)
        found.memory.append(now)
        print(json.dumps({"tokens": found.tokens, "mib": now}), flush=True)
        await asyncio.sleep(every_s)


def anonymous_mib(pid: int) -> float:
    """Of one process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise OSError(f"/proc/{pid}/status has no RssAnon")


async def first_error(clients: list[asyncio.Task[None]], *watchers: asyncio.Task[None]) -> None:
    """Until every client is over; an error of any task is raised."""
    pending: set[asyncio.Task[None]] = {*clients, *watchers}
    while not all(one.done() for one in clients):
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()


async def soak(arguments: argparse.Namespace) -> Found:
    """All of it."""
    found = Found()
    async with grpc.aio.insecure_channel(arguments.address) as channel:
        stub = rpc.InferenceStub(channel)
        end = time.perf_counter() + arguments.seconds
        clients = [
            asyncio.create_task(client(stub, arguments, i, end, found))
            for i in range(arguments.streams)
        ]
        watchers = (
            asyncio.create_task(watch_health(arguments.address, found)),
            asyncio.create_task(watch_memory(stub, arguments.seconds / SAMPLES, found)),
        )
        try:
            await first_error(clients, *watchers)
        finally:
            for task in (*clients, *watchers):
                task.cancel()
            await asyncio.gather(*clients, *watchers, return_exceptions=True)
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest."""
    ordered = sorted(values) or [0.0]
    last = len(ordered) - 1
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[round(share * last)], 4) for name, share in shares.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="HOST:PORT or unix:///path of gRPC")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="new requests begin until then"
    )
    parser.add_argument("--max-prompt", type=int, default=32, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bound-rounds", type=float, help="of the largest gap")
    parser.add_argument("--bound-health-s", type=float, help="of the slowest answer of health")
    parser.add_argument(
        "--bound-growth-mib",
        type=float,
        help="of each process",
    )
    arguments = parser.parse_args()
    begin = time.perf_counter()
    found = uvloop.run(soak(arguments))
    seconds = time.perf_counter() - begin
    growth = found.growth_mib()
    line = {
        "streams": arguments.streams,
        "seconds": round(seconds, 1),
        "requests": found.requests,
        "tokens": found.tokens,
        "tokens_per_s": round(found.tokens / seconds, 1),
        "gap_s": quantiles(found.gaps_s),
        "gap_rounds": quantiles(found.gaps_rounds),
        "first_token_s": quantiles(found.first_s),
        "health_s": quantiles(found.health_s),
        "growth_mib": growth,
    }
    print(json.dumps(line))
    bounds = (
        (max(found.gaps_rounds, default=0.0), arguments.bound_rounds),
        (max(found.health_s), arguments.bound_health_s),
        (max(growth.values(), default=0.0), arguments.bound_growth_mib),
    )
    sys.exit(any(bound is not None and value > bound for value, bound in bounds))


if __name__ == "__main__":
    main()
