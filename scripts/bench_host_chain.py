"""CPU time of the host between one iteration's end and the next one's submission, by step.

The real engine, scheduler and step ring, and what the gpu worker of a CUDA device does before its
first launch; a link that answers every plan at once stands for the device. Reports milliseconds per
iteration. The plans are those of a profile, so a table of the machine in question makes them its.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu_worker.cuda.exchange import DeviceExchange
from gpu_worker.cuda.plan_reader import HostPlanReader
from gpu_worker.plan_check import PlanLimits
from neo_native import (
    Control,
    Exchange,
    RowStatus,
    Segment,
    SegmentKind,
    Sequences,
    StepConsumer,
    StepProducer,
    make_geometry,
)
from neo_server.bench.drive import Recorder
from neo_server.block_manager import BlockManager
from neo_server.correction import CorrectedCost
from neo_server.engine import Engine
from neo_server.geometry import geometry_fields
from neo_server.gpu_client import write_step
from neo_server.launch import Options, resolve
from neo_server.policies import load_policy
from neo_server.request import SamplingParams, StopConditions
from neo_server.scheduler import Scheduler
from neo_server.simulator.workload import synthetic
from neo_server.step import Step, StepResult
from neo_server.table_cost import ProfileTable, TableCost
from neo_server.tokenizer import NoTokenizer
from protos.config import KvCacheDType

Spent = dict[str, list[float]]
HANDED = (SegmentKind.STEPS, SegmentKind.WORK, SegmentKind.EXCHANGE)
KEPT = (SegmentKind.CONTROL, SegmentKind.SEQUENCES)


class Plain:
    """A segment, not pinned."""

    def __init__(self, segment: Segment) -> None:
        buffer = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        self._segment, self._bytes = segment, torch.from_numpy(np.ctypeslib.as_array(buffer))

    def view(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``MappedSegment``."""
        rest = self._bytes[offset:]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)


class NoCache:
    """No CPU-cache: no kernel runs that would read it."""

    def view(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``MappedSegment``."""
        return torch.empty(0, dtype=dtype)


class Link:
    """Both ends of the step ring. Plans are retired as if they had run."""

    def __init__(self, geometry: Any, blocks: int, vocab_size: int, spent: Spent) -> None:
        steps, work, out = (self._segment(kind, geometry) for kind in HANDED)
        control, tables = (self._segment(kind, geometry) for kind in KEPT)
        self.sequences = Sequences(tables, geometry)
        self._producer = StepProducer(steps, geometry)
        self._consumer = StepConsumer(steps, geometry)
        width = int(geometry["max_blocks"]) * int(geometry["block_size"])
        limits = PlanLimits.from_geometry(geometry, blocks, width, vocab_size)
        self._reader = HostPlanReader(self.sequences, limits)
        self._exchange = DeviceExchange(
            Exchange(Control(control), work, out, geometry),
            SimpleNamespace(geometry=geometry),  # type: ignore[arg-type]
            *(self._reader, torch.bfloat16, 1.0, torch.device("cpu")),
            [Plain(work), Plain(out), NoCache()],  # type: ignore[list-item]
        )
        self._write = timed(spent, "write plan", write_step)
        self._read = timed(spent, "read plan", self._reader.read)
        self._announce = timed(spent, "announce", self._exchange.announce)

    @staticmethod
    def _segment(kind: SegmentKind, geometry: Any) -> Segment:
        fd = os.memfd_create("segment")
        try:
            return Segment.create(fd, kind, geometry)
        finally:
            os.close(fd)

    async def execute(self, step: Step) -> StepResult:
        """See ``GpuLink``."""
        slot = self._producer.acquire()
        assert slot is not None
        self._write(step, slot)
        self._producer.publish()
        assert self._consumer.wait(1.0)
        plan = self._read(self._consumer.front())
        self._announce(plan)
        self._exchange.retire(plan)
        self._consumer.release()
        await asyncio.sleep(0)
        sampled = step.sample.tolist()
        statuses = [int(RowStatus.SAMPLED if one else RowStatus.COMPUTED) for one in sampled]
        return StepResult(step.plan_id, statuses, [7] * len(sampled), 0.0)

    async def recovered(self) -> int:
        """See ``GpuLink``."""
        raise AssertionError("it never dies")


def timed(spent: Spent, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, whose CPU seconds go into ``spent``."""

    def measured(*arguments: Any) -> Any:
        begin = time.thread_time()
        try:
            return call(*arguments)
        finally:
            spent[name].append(time.thread_time() - begin)

    return measured


def make_engine(arguments: argparse.Namespace, table: ProfileTable, spent: Spent) -> Engine:
    """Sizes are the arguments', the model is the table's in shape."""
    resolved = resolve(
        Options(
            arguments.model,
            device="cpu",
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=2048,
            kv_offloading_size=arguments.kv_offloading_size,
            cpu_kv_cache_dtype=KvCacheDType.INT8,
            scheduling_policy=arguments.scheduling_policy,
        )
    )
    config, blocks = resolved.config, arguments.num_gpu_blocks
    geometry = make_geometry(**geometry_fields(config, resolved.model, 1))
    link = Link(geometry, blocks, resolved.model.vocab_size, spent)

    def make_blocks(num_gpu_blocks: int) -> BlockManager:
        sizes = (int(geometry[name]) for name in ("n_pages", "block_size", "page_size"))
        return BlockManager(link.sequences, num_gpu_blocks, *sizes)

    scheduler = Scheduler(
        *(config.scheduler, load_policy(arguments.scheduling_policy), make_blocks(blocks)),
        max_swaps=int(geometry["max_swaps"]),
        cpu_workers=lambda: 1,
        cost=CorrectedCost(TableCost(table)),
        modes=frozenset(load_policy("neo").modes),
        ride_groups=int(geometry["ride_groups"]),
    )
    engine = Engine(scheduler, link, NoTokenizer(), make_blocks, arguments.requests)
    scheduler.schedule = timed(spent, "schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = timed(spent, "update", scheduler.update)  # type: ignore[method-assign]
    engine._publish = timed(spent, "publish", engine._publish)  # type: ignore[method-assign]
    return engine


async def serve(engine: Engine, arguments: argparse.Namespace) -> None:
    """All requests at once, to their ends."""
    over = asyncio.Event()
    left = arguments.requests

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    lengths = synthetic(arguments.prompt, arguments.output, arguments.requests)
    for i, (prompt, output) in enumerate(lengths):
        stop = StopConditions(max_tokens=output)
        engine.submit(str(i), [5] * prompt, SamplingParams(seed=i), stop, Recorder(ended))
    task = asyncio.create_task(engine.run())
    await over.wait()
    task.cancel()


def main() -> None:
    """Prints one JSON line for each step: milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory with a config.json")
    parser.add_argument("profile", type=Path, help="a worker's profile of it, JSON")
    parser.add_argument("--scheduling-policy", default="neo")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--num-gpu-blocks", type=int, default=1650)
    parser.add_argument("--kv-offloading-size", type=float, default=24.0)
    arguments = parser.parse_args()
    spent: Spent = defaultdict(list)
    engine = make_engine(arguments, ProfileTable.parse(arguments.profile.read_text()), spent)
    pauses: list[float] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            pauses.append(-time.perf_counter())
        else:
            pauses[-1] += time.perf_counter()

    gc.callbacks.append(note)
    asyncio.run(serve(engine, arguments))
    iterations = len(spent["update"])
    waits = len(spent["schedule"]) - iterations
    print(json.dumps({"iterations": iterations, "schedule gave none": waits}))
    for name, seconds in [*spent.items(), ("garbage collection", pauses)]:
        values = 1e3 * np.array(seconds)
        at = {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99, 100)}
        print(json.dumps({"step": name, "count": len(values), **at}))


if __name__ == "__main__":
    main()
