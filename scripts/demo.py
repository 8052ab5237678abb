"""Serves a model on this machine and streams several answers at once through the gRPC API.

Two rounds over the same prompts: ``mixed`` forces every second request onto the CPU-attention
workers, ``neo`` decides by itself. Each round starts the server, one gpu worker and two
CPU-attention workers as processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from neo_server.chat_template import ChatTemplate
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

PROMPTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a haiku about the sea.",
    "Name three uses of a paper clip.",
    "Explain what a cache is to a child.",
    "What is the capital of France, and what is it known for?",
    "Give me a short recipe for pancakes.",
)
ROUNDS = (("mixed", "every second request forced onto the CPU"), ("neo", "its own choice"))
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


@dataclass
class Answer:
    """One request as it streams in."""

    prompt: str
    text: str = ""
    finish: pb.FinishInfo | None = None

    def placement(self) -> str:
        """Where its decode attention ran."""
        if self.finish is None:
            return "running"
        on_gpu, on_cpu = self.finish.num_gpu_decodes, self.finish.num_cpu_decodes
        if on_gpu and on_cpu:
            return f"GPU-request, then CPU-request ({on_gpu} + {on_cpu} steps)"
        return "CPU-request" if on_cpu else "GPU-request"

    def panel(self) -> Panel:
        """The request's box in the live display."""
        color = {"running": "white", "CPU-request": "yellow", "GPU-request": "green"}
        title = Text(f"{self.prompt} ({self.placement()})")
        style = color.get(self.placement(), "magenta")
        return Panel(
            Text(self.text.strip() or "…"), title=title, title_align="left", border_style=style
        )


@dataclass
class Round:
    """What one policy did."""

    policy: str
    answers: list[Answer]
    seconds: float = 0.0
    loads: pb.GetLoadsResponse = field(default_factory=pb.GetLoadsResponse)

    @property
    def tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(a.finish.num_output_tokens for a in self.answers if a.finish)

    @property
    def cpu_share(self) -> float:
        """Share of decode attention rows done by the CPU-attention workers."""
        total = self.loads.num_gpu_decodes + self.loads.num_cpu_decodes
        return self.loads.num_cpu_decodes / total if total else 0.0


def server_command(arguments: argparse.Namespace, policy: str, address_file: Path) -> list[str]:
    """``neo serve`` with a GPU-cache too small for all requests at once."""
    return [
        *(sys.executable, "-m", "neo_server", "serve", str(arguments.model)),
        *("--device", arguments.device, "--scheduling-policy", policy),
        *("--port", "0", "--control-port", "0", "--address-file", str(address_file)),
        *("--cpu-attn-workers", "2", "--max-model-len", "1024"),
        *("--num-gpu-blocks-override", "24", "--kv-offloading-size", "0.25"),
    ]


@contextlib.asynccontextmanager
async def running_server(arguments: argparse.Namespace, policy: str) -> AsyncIterator[str]:
    """Starts a server, yields its address once it is SERVING, stops it and checks its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        log_path, address_file = Path(folder) / "server.log", Path(folder) / "address"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *server_command(arguments, policy, address_file), stdout=log, stderr=log
            )
        try:
            yield await wait_until_serving(process, address_file)
        except BaseException:
            sys.stderr.write(log_path.read_text(errors="replace"))
            raise
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            sys.stderr.write(log_path.read_text(errors="replace"))
            raise SystemExit(f"the server ended with exit code {process.returncode}")


async def wait_until_serving(process: asyncio.subprocess.Process, address_file: Path) -> str:
    """The server's address, once its health service says SERVING."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise SystemExit(f"the server ended at start with exit code {process.returncode}")
        if address_file.exists():
            address = address_file.read_text().split()[0]
            async with grpc.aio.insecure_channel(address) as channel:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    reply = await health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=2.0
                    )
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return address
        await asyncio.sleep(0.1)
    raise SystemExit(f"the server was not ready within {START_TIMEOUT_S:.0f} s")


async def stream_answer(
    stub: rpc.InferenceStub, template: ChatTemplate | None, answer: Answer, max_tokens: int
) -> None:
    """Streams one request into ``answer``."""
    messages = [{"role": "user", "content": answer.prompt}]
    request = pb.GenerateRequest(
        text=template.render(messages) if template else answer.prompt,
        sampling_params=pb.SamplingParams(temperature=0.0),
        stop_conditions=pb.StopConditions(max_tokens=max_tokens),
    )
    async for response in stub.Generate(request):
        if response.HasField("delta"):
            answer.text += response.delta.text
        elif response.HasField("finish_info"):
            answer.finish = response.finish_info


async def run_round(arguments: argparse.Namespace, console: Console, policy: str) -> Round:
    """All prompts at once under one policy, drawn while they stream."""
    result = Round(policy, [Answer(prompt) for prompt in PROMPTS])
    template = ChatTemplate.from_pretrained(arguments.model)
    with console.status(f"starting the server ({policy})"):
        stack = contextlib.AsyncExitStack()
        address = await stack.enter_async_context(running_server(arguments, policy))
    async with stack, grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)
        began = time.monotonic()
        tasks = [
            asyncio.create_task(stream_answer(stub, template, answer, arguments.max_tokens))
            for answer in result.answers
        ]
        with Live(console=console, refresh_per_second=8, get_renderable=lambda: draw(result)):
            await asyncio.gather(*tasks)
        result.seconds = time.monotonic() - began
        result.loads = await stub.GetLoads(pb.GetLoadsRequest())
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    console.print(workers_line(info))
    return result


def draw(result: Round) -> RenderableType:
    """The live display: a box a request, two a line where the terminal is wide."""
    panels = [answer.panel() for answer in result.answers]
    width = shutil.get_terminal_size((100, 24)).columns
    return Columns(panels, width=width // 2 - 1) if width >= 120 else Group(*panels)


def workers_line(info: pb.GetServerInfoResponse) -> str:
    """Which processes took part."""
    parts = [f"server on {info.device}"]
    for worker in info.workers:
        name = pb.WorkerInfo.Kind.Name(worker.kind).removeprefix("KIND_").lower()
        done = f", {worker.tasks} attention tasks" if name == "cpu_attn" else ""
        parts.append(f"{name} worker pid {worker.pid}{done}")
    return " · ".join(parts)


def summary(rounds: list[Round]) -> Table:
    """The closing table, a column a round."""
    table = Table(title="NEO demo")
    table.add_column("")
    for result, (_, note) in zip(rounds, ROUNDS, strict=True):
        table.add_column(f"{result.policy}: {note}", justify="right")
    placements = [[answer.placement() for answer in result.answers] for result in rounds]
    table.add_row("GPU-requests", *(str(p.count("GPU-request")) for p in placements))
    table.add_row("CPU-requests", *(str(p.count("CPU-request")) for p in placements))
    both = [sum("then" in name for name in p) for p in placements]
    table.add_row("moved between the two", *map(str, both))
    table.add_row("output tokens", *(str(result.tokens) for result in rounds))
    table.add_row("tokens/s", *(f"{result.tokens / result.seconds:.1f}" for result in rounds))
    shares = (f"{100 * result.cpu_share:.0f} %" for result in rounds)
    table.add_row("decode attention on the CPU", *shares)
    kinds = sorted({kind for result in rounds for kind in result.loads.iterations})
    for kind in kinds:
        counts = (str(result.loads.iterations.get(kind, 0)) for result in rounds)
        table.add_row(f"iterations: {kind}", *counts)
    return table


async def demo(arguments: argparse.Namespace) -> None:
    """Both rounds, the table, and the check that both gave the same text."""
    console = Console()
    rounds = [await run_round(arguments, console, policy) for policy, _ in ROUNDS]
    console.print(summary(rounds))
    texts = [[answer.text for answer in result.answers] for result in rounds]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    console.print(f"answers that are the same in both rounds: {same} of {len(PROMPTS)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a local Hugging Face directory")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    asyncio.run(demo(arguments))


if __name__ == "__main__":
    main()
