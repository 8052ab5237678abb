"""CPU time of the server's process per streamed token: engine alone, over gRPC, over HTTP.

A link that takes a fixed time for every plan stands for the gpu worker, so that each token is a
message of its own. The clients run in a process of their own. What is imported or compiled at the
first request is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import uvloop
from grpc_health.v1._async import HealthServicer

from neo_native import RowStatus, slot_params_dtype
from neo_server.bench.drive import Recorder
from neo_server.block_manager import BlockManager
from neo_server.chat_template import ChatTemplate
from neo_server.correction import CorrectedCost
from neo_server.cost_model import FreeCost
from neo_server.engine import Engine
from neo_server.http.server import HttpServer, make_app
from neo_server.launch import Options, Resolved, resolve
from neo_server.listeners import listen, prompt_bytes, public_server
from neo_server.policies import load_policy
from neo_server.request import SamplingParams, StopConditions
from neo_server.scheduler import Scheduler
from neo_server.state import ServerState
from neo_server.step import Step, StepResult
from neo_server.tokenizer import Tokenizer
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

PROMPT = (5, 6, 7, 8)
PAGE = 64
WARM_TOKENS = 10


class PacedLink:
    """Answers every plan after ``plan_s`` seconds, with the tokens of a text in turn."""

    def __init__(self, plan_s: float, tokens: list[int]) -> None:
        self._plan_s = plan_s
        self._tokens = tokens
        self.ready_at = 0.0

    async def execute(self, step: Step) -> StepResult:
        """See ``GpuLink``; plans follow one another."""
        self.ready_at = max(self.ready_at, time.perf_counter()) + self._plan_s
        await asyncio.sleep(self.ready_at - time.perf_counter())
        token = self._tokens[step.plan_id % len(self._tokens)]
        sampled = step.sample.astype(bool).tolist()
        statuses = [int(RowStatus.SAMPLED if one else RowStatus.COMPUTED) for one in sampled]
        return StepResult(step.plan_id, statuses, [token] * len(sampled), self._plan_s)

    async def recovered(self) -> int:
        """See ``GpuLink``."""
        raise AssertionError("it never dies")


def make_engine(resolved: Resolved, tokenizer: Tokenizer, plan_s: float) -> Engine:
    """All sequences fit on the GPU."""
    config = resolved.config.scheduler
    width = -(-config.max_model_len // PAGE)
    tables: Any = SimpleNamespace(
        params=np.zeros(config.max_num_seqs, slot_params_dtype),
        block_table=np.zeros((config.max_num_seqs, width), np.uint32),
        page_table=np.zeros((config.max_num_seqs, width), np.uint32),
    )

    def make_blocks(num_gpu_blocks: int) -> BlockManager:
        return BlockManager(tables, num_gpu_blocks, 0, PAGE, PAGE)

    scheduler = Scheduler(
        config,
        load_policy("gpu-only"),
        make_blocks(config.max_num_seqs * width),
        max_swaps=1,
        cpu_workers=lambda: 0,
        cost=CorrectedCost(FreeCost()),
    )
    text = tokenizer.encode("Each token of this text is a message to the client who waits for it.")
    link = PacedLink(plan_s, text)
    return Engine(scheduler, link, tokenizer, make_blocks, config.max_num_seqs)


async def engine_alone(engine: Engine, streams: int, tokens: int) -> None:
    """Streams that nobody reads."""
    over = asyncio.Event()
    left = streams

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    for i in range(streams):
        stop = StopConditions(max_tokens=tokens)
        engine.submit(f"alone-{i}", list(PROMPT), SamplingParams(seed=i), stop, Recorder(ended))
    await over.wait()


async def grpc_client(address: str, streams: int, tokens: int) -> int:
    """Messages that came."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT),
            stop_conditions=pb.StopConditions(max_tokens=tokens, ignore_eos=True),
        )

        async def one() -> int:
            return len([m async for m in stub.Generate(request) if m.delta.token_ids])

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def http_client(address: str, streams: int, tokens: int) -> int:
    """Messages that came."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}

        async def one() -> int:
            url = f"http://{address}/v1/completions"
            async with client.stream("POST", url, json=body) as reply:
                return len([line async for line in reply.aiter_lines() if "text" in line])

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def measure(arguments: argparse.Namespace) -> None:
    """Prints one JSON line for each way, a value for each round."""
    options = Options(
        *(arguments.model,),
        device="cpu",
        max_num_seqs=arguments.streams,
        max_model_len=2048,
        kv_offloading_size=0.0,
        scheduling_policy="gpu-only",
    )
    resolved = resolve(options)
    tokenizer = Tokenizer.from_pretrained(resolved.config.model_path)
    engine = make_engine(resolved, tokenizer, arguments.plan_ms * 1e-3)
    memory: Any = SimpleNamespace(workers=list)
    state = ServerState(
        options=options,
        resolved=resolved,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_pretrained(resolved.config.model_path),
        memory=memory,
        gpu=SimpleNamespace(is_ready=True),  # type: ignore[arg-type]
        engine=engine,
    )
    task = asyncio.create_task(engine.run())
    public = public_server(state, HealthServicer())
    http = HttpServer(make_app(state, prompt_bytes(state)), "127.0.0.1", 0)
    addresses = {"grpc": await listen(public, "127.0.0.1", 0), "http": http.address}
    await http.start()
    for way in ("engine", "grpc", "http"):
        await _measure_way(way, engine, addresses, arguments, WARM_TOKENS)
        rounds = [
            await _measure_way(way, engine, addresses, arguments, arguments.tokens)
            for _ in range(arguments.rounds)
        ]
        names = rounds[0].keys()
        print(json.dumps({"way": way, **{name: [r[name] for r in rounds] for name in names}}))
    await http.stop(None)
    await public.stop(None)
    task.cancel()


async def _measure_way(
    way: str,
    engine: Engine,
    addresses: dict[str, str],
    arguments: argparse.Namespace,
    tokens: int,  # of each stream
) -> dict[str, float | None]:
    total = arguments.streams * tokens
    begin, cpu = time.perf_counter(), time.process_time()
    messages = None
    if way == "engine":
        await engine_alone(engine, arguments.streams, tokens)
    else:
        messages = await _run_client(way, addresses[way], arguments, tokens)
    return {
        "cpu_us_per_token": round((time.process_time() - cpu) / total * 1e6, 1),
        "tokens_per_s": round(total / (time.perf_counter() - begin)),
        "messages_per_token": messages and round(messages / total, 3),
    }


async def _run_client(way: str, address: str, arguments: argparse.Namespace, tokens: int) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, arguments.model, "--client", way, "--address", address),
        *("--streams", str(arguments.streams), "--tokens", str(tokens)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return int(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a local Hugging Face directory")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--plan-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", choices=("grpc", "http"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is None:
        uvloop.run(measure(arguments))  # as the server does
        return
    client = grpc_client if arguments.client == "grpc" else http_client
    print(asyncio.run(client(arguments.address, arguments.streams, arguments.tokens)))


if __name__ == "__main__":
    main()
