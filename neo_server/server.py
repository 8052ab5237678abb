"""One server from start to end: segments, workers, services, readiness, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from neo_server.block_manager import BlockManager
from neo_server.chat_template import ChatTemplate
from neo_server.correction import CorrectedCost
from neo_server.cost_model import FreeCost
from neo_server.engine import Engine
from neo_server.errors import ConfigurationError
from neo_server.geometry import SPARE_WORKERS, geometry_fields, num_cpu_pages
from neo_server.gpu_client import GpuClient
from neo_server.health import Health
from neo_server.launch import Options, Resolved
from neo_server.listeners import control_server, listen, prompt_bytes, public_server
from neo_server.plan import Mode, Place
from neo_server.policies import Policy, load_policy
from neo_server.request import SamplingParams, StopConditions
from neo_server.scheduler import RUNNABLE, Scheduler
from neo_server.service_names import SERVICES
from neo_server.shared_memory import SharedMemory
from neo_server.state import ServerState
from neo_server.stats_log import StatsLog, log_sizes
from neo_server.supervisor import Supervisor, worker_command
from neo_server.table_cost import ProfileTable, TableCost
from neo_server.tasks import first_of, race
from neo_server.tls import Tls
from neo_server.tokenizer import AnyTokenizer, NoTokenizer, Tokenizer
from protos.config import WorkerConfig
from protos.credentials import API_KEY_VARIABLE

_log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[ServerState, Engine], Coroutine[Any, Any, T]]
_PLAN_TIMEOUT_S = {"cuda": 60.0, "cpu": 600.0}  # a CPU prefills a large model's prompt slowly
_FLUSH_S = 2.0  # for the last messages of drained streams


class _Stoppable(Protocol):
    """A server of either protocol."""

    async def stop(self, grace: float | None) -> None:
        """Ends it; what runs has ``grace`` seconds."""


class Server:
    """Owns every part; ``run`` is its whole life."""

    def __init__(self, options: Options, resolved: Resolved) -> None:
        self.options = options
        self.resolved = resolved
        self.policy: Policy = load_policy(resolved.config.scheduler.scheduling_policy)
        self.num_cpu_pages = num_cpu_pages(
            resolved.config.cache, resolved.model, resolved.config.worker.dtype
        )
        size = resolved.config.cache.kv_offloading_size
        self._check_places(f"kv_offloading_size, {size} GiB, holds no page")
        self.address = ""
        self.control_address = ""
        self._health = Health(SERVICES)
        self.http_address = ""
        self._servers: list[_Stoppable] = []
        self._engine_task: asyncio.Task[None] | None = None
        self.state: ServerState | None = None
        self.before_workers: Callable[[SharedMemory], None] = lambda _memory: None

    def _check_places(self, reason: str) -> None:
        if self.policy.places == {Place.CPU} and self.num_cpu_pages == 0:
            raise ConfigurationError(f"scheduling_policy is {self.policy.name}; {reason}")

    async def run(self) -> None:
        """Serves until SIGINT or SIGTERM; a second signal ends the drain at once."""
        first, second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: (second if first.is_set() else first).set())
        try:
            state = await self._open()
            assert state.supervisor is not None
            self.address = await self._listen(
                public_server(state, self._health.servicer),
                self.options.host,
                self.options.port,
                Tls.of(self.options),
            )
            await self._listen_http(state)
            _log.info("listening on %s, control on %s", self.address, self.control_address)
            if self.http_address:
                _log.info("HTTP on %s", self.http_address)
            await race(self._serve(state), state.supervisor.failure(), first.wait())
            _log.info("draining: at most %s s", self.options.shutdown_timeout)
            await race(self._drain(state), second.wait())
        finally:
            await self._close()

    async def profile(self) -> ProfileTable | None:
        """Starts the workers, takes the gpu worker's profile and ends them."""
        try:
            state = await self._open()
            assert state.supervisor is not None
            await race(state.gpu.recovered(), state.supervisor.failure())
            return state.gpu.table
        finally:
            await self._close()

    async def offline(self, work: Work[T], *, signals: bool = True) -> T:
        """Runs ``work`` on a warm engine, without the public service; then ends everything.

        Raises what the work raises, ``NeoError`` when the engine or a worker fails meanwhile, and
        ``CancelledError`` after SIGINT or SIGTERM. ``signals``: these are handled, which takes the
        main thread.
        """
        task = asyncio.current_task()
        assert task is not None
        if signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            state = await self._open()
            assert state.supervisor is not None
            return await first_of(self._work_offline(state, work), state.supervisor.failure())
        finally:
            await self._close()

    async def _work_offline(self, state: ServerState, work: Work[T]) -> T:
        engine = await self._start_engine(state)
        assert self._engine_task is not None
        return await first_of(work(state, engine), asyncio.shield(self._engine_task))

    async def _open(self) -> ServerState:
        """Segments, the control service, worker processes; health is NOT_SERVING."""
        config, model = self.resolved.config, self.resolved.model
        workers = config.worker.cpu_attn_workers + SPARE_WORKERS
        tokenizer: AnyTokenizer = NoTokenizer()
        chat_template = None
        if self.resolved.has_tokenizer:
            tokenizer = Tokenizer.from_pretrained(config.model_path)
            chat_template = ChatTemplate.from_pretrained(config.model_path)
        memory = SharedMemory(geometry_fields(config, model, workers), config.cache.shm_dir)
        gpu = GpuClient(
            memory.producer,
            memory.consumer,
            lambda _ready: self._health.changed(),
            self._gpu_hangs,
            plan_timeout_s(self.options, config.worker),
        )
        # From here on _close() removes the segments, whatever happens.
        state = self.state = ServerState(
            options=self.options,
            resolved=self.resolved,
            tokenizer=tokenizer,
            chat_template=chat_template,
            memory=memory,
            gpu=gpu,
        )
        await self._health.open()
        if self.options.api_key is not None:
            os.environ[API_KEY_VARIABLE] = self.options.api_key  # for the workers
        self.control_address = await self._listen(
            control_server(state), self.options.control_host, self.options.control_port
        )
        self.before_workers(memory)
        state.supervisor = Supervisor(
            memory,
            worker_command("gpu_worker", self.control_address, "--spawned")
            if self.options.spawn_gpu_worker
            else None,
            worker_command("cpu_attn_worker", self.control_address, "--spawned"),
            self._gpu_died,
            lambda: gpu.is_ready,
        )
        spawns = self.options.spawn_cpu_attn_workers
        state.supervisor.start(config.worker.cpu_attn_workers if spawns else 0)
        return state

    async def _listen(
        self, server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None
    ) -> str:
        address = await listen(server, host, port, tls)
        self._servers.append(server)
        return address

    async def _listen_http(self, state: ServerState) -> None:
        """Where it is asked for: its packages are imported only then."""
        target = self.options.http_target
        if target is None:
            return
        from neo_server.http.server import HttpServer, make_app

        app = make_app(state, prompt_bytes(state))
        http = HttpServer(app, *target, Tls.of(self.options))
        self._servers.append(http)
        self.http_address = state.http_address = http.address
        await http.start()

    async def _serve(self, state: ServerState) -> None:
        """Becomes ready, then follows the engine, which ends only by failing."""
        engine = await self._start_engine(state)
        assert self._engine_task is not None
        await self._health.look(state.trouble)  # whoever finds the address may ask at once
        if self.options.address_file is not None:
            addresses = (self.address, self.control_address, self.http_address)
            line = " ".join(filter(None, addresses))
            write_atomically(self.options.address_file, f"{line}\n")
        blocks, limit = engine.scheduler.blocks, engine.scheduler.max_tokens_per_sequence
        log_sizes(engine)
        _log.info("ready: %d GPU blocks, requests of up to %d tokens", blocks.blocks.total, limit)
        follow = [self._health.watch(state.trouble)]
        if interval := self.options.log_stats_interval:
            follow.append(StatsLog(engine, interval).run())
        await race(asyncio.shield(self._engine_task), *follow)

    async def _start_engine(self, state: ServerState) -> Engine:
        """Waits for the gpu worker; the engine has run once when this returns."""
        blocks = self._make_blocks(await state.gpu.recovered())
        table = state.gpu.table
        pool = state.memory.cpu_pool
        cost = CorrectedCost(FreeCost() if table is None else TableCost(table, pool.live_threads))
        scheduler = Scheduler(
            self.resolved.config.scheduler,
            self.policy,
            blocks,
            max_swaps=self.resolved.config.scheduler.max_num_seqs,
            cpu_workers=pool.live_workers,
            cost=cost,
            modes=state.gpu.modes or RUNNABLE,
            ride_groups=self.resolved.model.num_hidden_layers + 1,
        )
        engine = Engine(
            scheduler,
            state.gpu,
            state.tokenizer,
            self._make_blocks,
            self.options.max_num_queued_reqs,
            pool.note_void,
            max_num_queued_tokens=self.options.max_num_queued_tokens,
        )
        self._engine_task = asyncio.create_task(engine.run())
        await race(_warm_up(engine), asyncio.shield(self._engine_task))
        engine.reset_metrics()
        state.engine = engine
        assert state.supervisor is not None
        state.supervisor.server_is_ready()
        return engine

    def _make_blocks(self, num_gpu_blocks: int) -> BlockManager:
        assert self.state is not None
        if self.state.gpu.modes == {Mode.GPU_ONLY}:  # for good: the scheduler keeps the modes too
            self.num_cpu_pages = 0
            self._check_places("the gpu worker runs no plan with CPU-requests")
        cache = self.resolved.config.cache
        return BlockManager(
            self.state.memory.sequences,
            num_gpu_blocks,
            self.num_cpu_pages,
            cache.block_size,
            cache.cpu_kv_page_size,
        )

    def _gpu_died(self) -> None:
        assert self.state is not None
        self.state.memory.clear_plans()
        self.state.gpu.mark_dead()

    def _gpu_hangs(self) -> None:
        if self.state is not None and self.state.supervisor is not None:
            self.state.memory.give_up_gpu_worker()
            self.state.supervisor.kill_gpu_worker()

    async def _drain(self, state: ServerState) -> None:
        await self._health.drain()
        if state.engine is None or self._engine_task is None:
            return
        await race(
            state.engine.drain(self.options.shutdown_timeout), asyncio.shield(self._engine_task)
        )
        await asyncio.gather(*(server.stop(_FLUSH_S) for server in reversed(self._servers)))

    async def _close(self) -> None:
        """Ends the engine, the services, the children; removes the segments."""
        await self._health.drain()
        if self._engine_task is not None:
            self._engine_task.cancel()
            await asyncio.gather(self._engine_task, return_exceptions=True)
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        if self.state is None:
            return
        try:
            self.state.memory.set_stopping()
            if self.state.supervisor is not None:
                await self.state.supervisor.stop()
            self.state.gpu.close()
        finally:
            self.state.memory.close()
            if self.options.address_file is not None:
                self.options.address_file.unlink(missing_ok=True)


def plan_timeout_s(options: Options, worker: WorkerConfig) -> float:
    """After this long without a result a gpu worker counts as hung.

    Both sub-batches may wait ``--cpu-attn-timeout`` for the cpu workers besides.
    """
    own = options.plan_timeout
    if own is None:
        own = _PLAN_TIMEOUT_S[worker.device]
    return own + 2 * worker.cpu_attn_timeout_s


async def _warm_up(engine: Engine) -> None:
    """One generation through every process."""
    room = engine.scheduler.max_tokens_per_sequence
    if room < 2:
        raise ConfigurationError(f"max_model_len or the caches allow {room} tokens; 2 are needed")
    stop = StopConditions(max_tokens=min(4, room - 1))
    stream = engine.submit("warm-up", [0], SamplingParams(seed=0, temperature=0.0), stop)
    while (await stream.next()).finish is None:
        pass


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the whole file or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
