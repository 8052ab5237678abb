"""How long planning takes: a whole ``Scheduler.schedule`` of a busy server, no worker behind it.

For several sizes of the queues, decode-only iterations in the steady state; prints medians of
CPU time.
Planning 1000 running and 5000 waiting requests is meant to take under 2 ms, and not to grow faster
than the queues.
"""

from __future__ import annotations

import argparse
import gc
import random
import time

import numpy as np

from neo_native import RowStatus
from neo_server.policies import load_policy
from neo_server.roofline import SHAPES, RooflineCost, load_hardware
from neo_server.scheduler import Scheduler
from neo_server.simulator.run import Setting, Simulation
from neo_server.simulator.workload import Arrival
from neo_server.step import Step, StepResult
from protos.config import SchedulerConfig

PROMPT = 64


def busy_server(policy: str, running: int, waiting: int) -> Simulation:
    """All seats taken, a fifth of them by CPU-requests where the policy has any."""
    config = SchedulerConfig(
        scheduling_policy=policy,
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, running * PROMPT),
        max_model_len=4096,
    )
    cost = RooflineCost(load_hardware("g5.16xlarge"), SHAPES["llama-3.1-8b"])
    gpu_tokens = running * (PROMPT + 64) if policy == "gpu-only" else running * PROMPT
    filler = policy if policy == "gpu-only" else "mixed"
    simulation = Simulation(Setting(filler, cost, gpu_tokens, running * 512, config))
    rng = random.Random(0)
    for number in range(running + waiting):
        simulation.admit(number, Arrival(0.0, rng.randint(PROMPT // 2, PROMPT), 4000))
    scheduler = simulation.scheduler
    while len(scheduler.running) < running:  # quickly, by a policy that fills both caches
        step = scheduler.schedule()
        assert step is not None
        answer(scheduler, step)
    scheduler.policy = load_policy(policy)
    return simulation


def answer(scheduler: Scheduler, step: Step) -> None:
    """What a worker would send."""
    sample = step.sample.tolist()
    statuses = [RowStatus.SAMPLED if s else RowStatus.COMPUTED for s in sample]
    scheduler.update(step, StepResult(step.plan_id, statuses, [1] * len(sample), 0.0))


def measure(policy: str, running: int, waiting: int, iterations: int) -> list[float]:
    """Seconds of each call, after the queues are full."""
    scheduler = busy_server(policy, running, waiting).scheduler
    seconds = []
    for number in range(iterations + 5):
        gc.disable()
        begin = time.thread_time()
        step = scheduler.schedule()
        spent = time.thread_time() - begin
        gc.enable()
        assert step is not None
        if number >= 5:
            seconds.append(spent)
        answer(scheduler, step)
    return seconds


def main() -> None:
    """Prints one line per policy and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    print("policy       running  waiting  median ms  p90 ms")
    for policy in ("gpu-only", "neo"):
        for running, waiting in ((100, 500), (1000, 5000), (2000, 10_000), (10_000, 10_000)):
            times = 1e3 * np.array(measure(policy, running, waiting, arguments.iterations))
            middle, high = np.median(times), np.percentile(times, 90)
            print(f"{policy:12} {running:7} {waiting:8} {middle:10.2f} {high:7.2f}")


if __name__ == "__main__":
    main()
