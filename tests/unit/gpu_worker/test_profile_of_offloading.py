"""What is measured at start is what the server's plans need."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gpu_worker.backends import modes_run
from gpu_worker.worker import READY, GpuWorker
from protos.config import (
    PLAN_MODES,
    CacheConfig,
    EngineConfig,
    PlanMode,
    SchedulerConfig,
    WorkerConfig,
)

THREADS = 3


def profiled(folder: Path, config: EngineConfig, modes: tuple[PlanMode, ...]) -> Any:
    """The table of a worker that runs ``modes``, beside one cpu worker of ``THREADS`` threads."""
    (folder / "config.json").write_text("{}")
    worker = object.__new__(GpuWorker)
    rows = np.array([(READY, THREADS)], [("state", np.uint32), ("n_threads", np.uint32)])
    profiler = SimpleNamespace(run=lambda threads: {"threads": threads})
    worker.device, worker._world_size = torch.device("cpu"), 1
    worker._config, worker._asked_to_leave = config, lambda: True
    worker._control = cast(Any, SimpleNamespace(worker_rows=lambda: rows))
    worker._backend = cast(Any, SimpleNamespace(modes=modes, profiler=profiler))
    return json.loads(worker.profile())


@pytest.mark.parametrize(
    ("gib", "sent", "run", "offloads", "threads"),
    [
        (1.0, PLAN_MODES, PLAN_MODES, True, THREADS),
        (1.0, ("one_batch",), PLAN_MODES, True, THREADS),
        (1.0, ("gpu_only",), PLAN_MODES, False, 0),
        (0.0, PLAN_MODES, PLAN_MODES, False, 0),
        (1.0, PLAN_MODES, modes_run(riders=True, offloads=False), False, 0),
    ],
    ids=["neo", "simple-offload", "gpu-only", "no CPU-cache", "a worker that cannot"],
)
def test_cpu_attention_is_measured_where_there_may_be_cpu_requests(
    gib: float,
    sent: tuple[PlanMode, ...],
    run: tuple[PlanMode, ...],
    offloads: bool,
    threads: int,
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        model_path=str(tmp_path),
        cache=CacheConfig(kv_offloading_size=gib),
        scheduler=SchedulerConfig(plan_modes=sent),
        worker=WorkerConfig(profile_dir=str(tmp_path), cpu_attn_workers=1),
    )
    table = profiled(tmp_path, config, run)
    assert table["threads"] == table["key"]["cpu_attn_threads"] == threads
    assert table["key"]["offloads"] == offloads
