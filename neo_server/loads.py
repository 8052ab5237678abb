"""How full the server is at this moment, in the words of every protocol and of the log."""

from __future__ import annotations

from dataclasses import dataclass

from neo_server.block_manager import BlockManager, Pool
from neo_server.engine import Engine
from neo_server.plan import Place


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Tokens that what is taken of a cache has room for, and that all of it has."""

    used: int
    total: int

    @property
    def share(self) -> float:
        """1 is full; 0 also where there is no cache."""
        return self.used / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Loads:
    """Requests that hold cache and that wait, and both caches."""

    running: int
    running_on_cpu: int  # of ``running``: their cache is the CPU-cache
    waiting: int
    waiting_tokens: int
    gpu: CacheUse
    cpu: CacheUse


def loads_of(engine: Engine) -> Loads:
    """Counts what the scheduler holds."""
    scheduler = engine.scheduler
    return Loads(
        running=len(scheduler.running),
        running_on_cpu=sum(seq.place is Place.CPU for seq in scheduler.running.values()),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.num_waiting_tokens,
        gpu=_use(scheduler.blocks.blocks, scheduler.blocks.block_size),
        cpu=_use(scheduler.blocks.pages, scheduler.blocks.page_size),
    )


def concurrency(blocks: BlockManager, places: frozenset[Place], tokens: int) -> tuple[float, float]:
    """Requests of ``tokens`` tokens that the GPU-cache and the CPU-cache hold at once.

    A cache that is no place of the policy's holds none.
    """
    per_block = blocks.blocks.total / -(-tokens // blocks.block_size)
    per_page = blocks.pages.total / -(-tokens // blocks.page_size)
    return (
        per_block if Place.GPU in places else 0.0,
        per_page if Place.CPU in places else 0.0,
    )


def _use(pool: Pool, size: int) -> CacheUse:
    return CacheUse(pool.used * size, pool.total * size)
