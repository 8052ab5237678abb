"""The HTTP service on a real socket, over the engine on a fake gpu worker in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from neo_server.chat_template import ChatTemplate
from neo_server.engine import Engine
from neo_server.http.server import HttpServer, make_app
from neo_server.launch import Options, Resolved
from neo_server.state import ServerState
from neo_server.step import Step, StepResult
from neo_server.tokenizer import AnyTokenizer
from protos.config import EngineConfig
from protos.model_config import parse_model_config
from tests.unit.neo_server.conftest import CONFIG
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_tokenizer import TOKENIZERS

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = Sizes(policy="mixed", gpu_blocks=64, cpu_pages=32, budget=64, max_model_len=64)


class Gated(Simulation):
    """No plan ends while the gate is closed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def execute(self, step: Step) -> StepResult:
        await self.gate.wait()
        return await super().execute(step)


class Rig:
    """A client and what is behind it."""

    def __init__(self, state: ServerState, simulation: Gated, client: httpx.AsyncClient) -> None:
        self.state, self.simulation, self.client = state, simulation, client

    @property
    def engine(self) -> Engine:
        return self.state.serving_engine()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20.0):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_free(self) -> None:
        await self.until(lambda: not self.engine.scheduler.has_work)
        await self.until(self.simulation.is_empty)


@contextlib.asynccontextmanager
async def serve(
    sizes: Sizes = SIZES,
    tokenizer: AnyTokenizer = TOKENIZERS["byte level"],
    template: str | None = TEMPLATE,
    max_num_queued_reqs: int = 100,
    **options: Any,
) -> AsyncIterator[Rig]:
    simulation = Gated(sizes)
    engine = Engine(
        *(simulation.scheduler, simulation, tokenizer, simulation.make_blocks, max_num_queued_reqs)
    )
    config = EngineConfig(model_path="tiny", scheduler=sizes.config)
    memory: Any = SimpleNamespace(workers=list, cpu_pool=SimpleNamespace(live_workers=lambda: 2))
    gpu: Any = SimpleNamespace(is_ready=True, is_late=False)
    state = ServerState(
        options=Options(model="tiny", **options),
        resolved=Resolved(config, parse_model_config(CONFIG, {})),
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, {}),
        memory=memory,
        gpu=gpu,
        engine=engine,
    )
    http = HttpServer(make_app(state, 1 << 10), "127.0.0.1", 0)
    task = asyncio.create_task(engine.run())
    await http.start()
    try:
        url = f"http://{http.address}"
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            yield Rig(state, simulation, client)
    finally:
        simulation.gate.set()
        await http.stop(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


Serve = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serve() as rig:
        yield rig
