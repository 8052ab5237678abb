"""The scheduler and engine on a fake gpu worker in the same process."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neo_native import (
    max_biases,
    result_header_dtype,
    result_row_dtype,
    slot_params_dtype,
    step_header_dtype,
    step_row_dtype,
    swap_dtype,
    token_bias_dtype,
)
from neo_server.block_manager import BlockManager
from neo_server.correction import CorrectedCost
from neo_server.cost_model import CostModel, FreeCost
from neo_server.errors import GpuWorkerDiedError
from neo_server.gpu_client import read_result, write_step
from neo_server.plan import Mode
from neo_server.policies import load_policy
from neo_server.request import SamplingParams, Sequence
from neo_server.scheduler import Scheduler
from neo_server.step import Step, StepResult
from protos.config import SchedulerConfig
from tests.helpers.fake_gpu_worker import FakeModel
from tests.helpers.fake_riders import RideGroups


@dataclass(frozen=True)
class Sizes:
    """Small enough that caches overflow all the time."""

    policy: str = "neo"
    gpu_blocks: int = 8
    cpu_pages: int = 8
    block_size: int = 2
    page_size: int = 4
    max_num_seqs: int = 4
    budget: int = 8
    max_model_len: int = 32
    chunked: bool = True
    layers: int = 3
    ride_capacity: int = 0  # 0: nobody rides

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            scheduling_policy=self.policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.chunked,
            ride_capacity=self.ride_capacity,
        )


class PlainTables:
    """The sequence table in private memory."""

    def __init__(self, sizes: Sizes) -> None:
        slots = sizes.max_num_seqs
        self.params = np.zeros(slots, slot_params_dtype)
        blocks = -(-sizes.max_model_len // sizes.block_size)
        pages = -(-sizes.max_model_len // sizes.page_size)
        self.block_table = np.full((slots, blocks), 2**32 - 1, np.uint32)
        self.page_table = np.full((slots, pages), 2**32 - 1, np.uint32)
        self.bias = np.zeros((slots, max_biases), token_bias_dtype)


class Slot:
    """A slot of either ring."""

    def __init__(self, header: Any, row: Any, sizes: Sizes) -> None:
        self.header = np.zeros((), header)
        self.rows = np.zeros(sizes.max_num_seqs, row)
        self.swaps = np.zeros(sizes.max_num_seqs, swap_dtype)
        self.tokens = np.zeros(sizes.budget, np.int32)


@dataclass
class Simulation:
    """Scheduler plus model; ``rng`` decides about voids and deaths."""

    sizes: Sizes
    seed: int = 0
    void_rate: float = 0.0
    death_rate: float = 0.0
    cpu_workers: int = 2
    cost: CostModel = field(default_factory=FreeCost)
    in_flight: Any = None  # called while a plan is in flight
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.tables = PlainTables(self.sizes)
        self.scheduler = Scheduler(
            self.sizes.config,
            load_policy(self.sizes.policy),
            self.make_blocks(self.sizes.gpu_blocks),
            max_swaps=self.sizes.max_num_seqs,
            cpu_workers=lambda: self.cpu_workers,
            cost=CorrectedCost(self.cost),
            modes=frozenset(Mode),
            ride_groups=self.sizes.layers + 1,
        )
        self.model = self.make_model()

    def make_blocks(self, num_gpu_blocks: int) -> BlockManager:
        s = self.sizes
        return BlockManager(self.tables, num_gpu_blocks, s.cpu_pages, s.block_size, s.page_size)

    def make_model(self) -> FakeModel:
        s = self.sizes
        return FakeModel(
            *(self.tables, s.gpu_blocks, s.cpu_pages, s.block_size, s.page_size, s.budget),
            voids=lambda: self.rng.random() < self.void_rate,
            groups=RideGroups(s.layers + 1, s.ride_capacity),
        )

    def compute(self, step: Step) -> StepResult:
        """Through the same slot layouts as the rings."""
        sent = Slot(step_header_dtype, step_row_dtype, self.sizes)
        write_step(step, sent)  # type: ignore[arg-type]
        answers = self.model.answer(sent.header, sent.rows, sent.swaps, sent.tokens)
        got = Slot(result_header_dtype, result_row_dtype, self.sizes)
        got.header["plan_id"], got.header["n_rows"] = step.plan_id, len(answers)
        got.rows["status"][: len(answers)] = [status for status, _ in answers]
        got.rows["token"][: len(answers)] = [token for _, token in answers]
        return read_result(got)  # type: ignore[arg-type]

    async def execute(self, step: Step) -> StepResult:
        """As ``GpuLink``."""
        await asyncio.sleep(0)
        if self.in_flight is not None:
            self.in_flight()
        if self.rng.random() < self.death_rate:
            last = self.model.last_plan
            self.model = self.make_model()
            self.model.last_plan = last
            raise GpuWorkerDiedError("killed by the test")
        return self.compute(step)

    async def recovered(self) -> int:
        """As ``GpuLink``."""
        await asyncio.sleep(0)
        return self.sizes.gpu_blocks

    def sequence(self, id_: int, prompt: list[int]) -> Sequence:
        return Sequence(id_, array("i", prompt), len(prompt), SamplingParams(seed=id_))

    def is_empty(self) -> bool:
        blocks = self.scheduler.blocks
        return blocks.blocks.used == blocks.pages.used == blocks.slots.used == 0
