"""Who gets which cores: attention threads, PyTorch, and those left to everything else."""

from __future__ import annotations

from dataclasses import dataclass

_CUDA_RESERVED = 2  # one for the gpu worker's launcher, one for the server


@dataclass(frozen=True, slots=True)
class CorePlan:
    """A division of the usable cores."""

    attn_threads: int  # of each worker
    reserved: int  # cores that no attention thread is pinned to
    pin: bool  # whether every attention thread can have a core of its own
    torch_threads: int  # 0: PyTorch's own choice


def plan_cores(
    n_cores: int, workers: int, threads: int | None, reserved: int | None, *, is_cuda: bool
) -> CorePlan:
    """``threads`` and ``reserved`` as given, or None for the defaults.

    Reserved: with CUDA 2, else half of the cores, which PyTorch computes with; but never so many
    that a worker gets no core, so 0 where cores are scarce. Threads: the other cores divided among
    the workers, at least 1. Threads are pinned where all of them, and on a CPU PyTorch too, have
    cores of their own; elsewhere a pinned thread would wait for a busy core beside an idle one.
    """
    if reserved is None:
        wanted = _CUDA_RESERVED if is_cuda else n_cores // 2
        reserved = max(0, min(wanted, n_cores - max(1, workers)))
    if threads is None:
        threads = max(1, (n_cores - reserved) // max(1, workers))
    fits = workers * threads + reserved <= n_cores
    return CorePlan(
        attn_threads=threads,
        reserved=reserved,
        pin=fits and (is_cuda or reserved > 0),
        torch_threads=0 if is_cuda else max(1, n_cores - workers * threads),
    )
