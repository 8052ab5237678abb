"""A scheduler that swaps all the time on a small random model's executor, in one process."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from gpu_worker.cuda.executor import CudaExecutor
from gpu_worker.cuda.graphs import Graphs
from gpu_worker.cuda.stages import Stages
from gpu_worker.cuda.streams import OneStream
from gpu_worker.executor import Outcome
from gpu_worker.features import Features
from neo_native import (
    result_header_dtype,
    result_row_dtype,
    step_header_dtype,
    step_row_dtype,
)
from neo_server.block_manager import BlockManager
from neo_server.correction import CorrectedCost
from neo_server.cost_model import FreeCost
from neo_server.geometry import PLANS_IN_FLIGHT
from neo_server.gpu_client import read_result, write_step
from neo_server.plan import Mode
from neo_server.policies import load_policy
from neo_server.request import SamplingParams, Sequence
from neo_server.scheduler import Scheduler
from neo_server.step import Step, StepResult
from protos.config import PLAN_MODES
from tests.gpu.kernel_rig import DEVICE, LEN, PAGE_SIZE, SLOTS, KernelRig
from tests.helpers import policies
from tests.unit.neo_server.simulation import Sizes, Slot

SIZES = Sizes(
    policy="tests.helpers.policies:restful_churn", gpu_blocks=64, cpu_pages=96, block_size=16,
    page_size=PAGE_SIZE, max_num_seqs=12, budget=192, max_model_len=240,
)  # fmt: skip
REQUESTS, NEW_TOKENS, LONGEST_PROMPT = 48, 40, 150


@dataclass
class Left:
    """What a run leaves."""

    tokens: list[list[int]]
    gpu: Tensor
    cpu: bytes
    swaps: int


def scheduler_on(rig: KernelRig, sizes: Sizes) -> Scheduler:
    blocks = BlockManager(
        rig.sequences, sizes.gpu_blocks, sizes.cpu_pages, sizes.block_size, sizes.page_size
    )
    return Scheduler(
        sizes.config, load_policy(sizes.policy), blocks, max_swaps=8, cpu_workers=lambda: 1,
        cost=CorrectedCost(FreeCost()), modes=frozenset(Mode),
    )  # fmt: skip


def runner_on(rig: KernelRig, graphs: bool, one_stream: bool) -> CudaExecutor:
    exchange = rig.exchange
    assert exchange is not None
    if one_stream:
        exchange.streams = OneStream(DEVICE)
    model = rig.stages.model
    stages = Stages(model, rig.cache, rig.buffers, exchange, LEN)
    captured = None
    if graphs:
        captured = Graphs(stages, SIZES.max_num_seqs, SIZES.budget)
        captured.capture(PLAN_MODES)
    features = Features(DEVICE, SLOTS, LEN, rig.config.vocab_size, model.logits)
    layout = rig.reader.layout
    return CudaExecutor(
        stages, rig.cache, layout, captured, PLANS_IN_FLIGHT, lambda: True, features
    )


def result_of(step: Step, outcome: Outcome, sizes: Sizes) -> StepResult:
    got = Slot(result_header_dtype, result_row_dtype, sizes)
    got.header["plan_id"], got.header["n_rows"] = step.plan_id, len(outcome.slots)
    for name in ("slot", "status", "token", "logprob"):
        source = {"slot": "slots", "token": "tokens", "logprob": "logprobs"}.get(name, name)
        got.rows[name][: len(outcome.slots)] = getattr(outcome, source)
    return cast(StepResult, read_result(got))  # type: ignore[arg-type]


def serve(rig: KernelRig, runner: CudaExecutor, sizes: Sizes, requests: int) -> Left:
    """All requests at once, two plans in flight."""
    policies._random.seed(3)
    draw = random.Random(3)
    scheduler = scheduler_on(rig, sizes)
    greedy, sequences = SamplingParams(seed=0, temperature=0.0), []
    for i in range(requests):
        n = draw.randint(1, LONGEST_PROMPT)
        prompt = array("i", draw.choices(range(3, rig.config.vocab_size), k=n))
        sequences.append(Sequence(i, prompt, n, greedy))
        scheduler.add(sequences[-1])
    flights: list[Step] = []
    while scheduler.has_work or flights:
        step = None
        if scheduler.has_work and not runner.full:
            step = scheduler.schedule()
        if step is not None:
            sent = Slot(step_header_dtype, step_row_dtype, sizes)
            write_step(step, sent)  # type: ignore[arg-type]
            runner.submit(rig.reader.read(cast(Any, sent)))
            flights.append(step)
            continue
        step = flights.pop(0)
        for seq, _ in scheduler.update(step, result_of(step, runner.collect(), sizes)):
            if len(seq.tokens) - seq.num_prompt == NEW_TOKENS:
                scheduler.finish(seq)
    assert scheduler.metrics.num_voided_rows == 0
    swaps = scheduler.metrics.num_swap_outs + scheduler.metrics.num_swap_ins
    tokens = [list(seq.tokens)[seq.num_prompt :] for seq in sequences]
    return Left(tokens, rig.cache.blocks.clone(), rig.tiles(rig.segments.cpu_cache), swaps)
