"""What the server says of itself in its log: sizes at the start, then a line now and then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from neo_server.engine import Engine
from neo_server.loads import concurrency, loads_of

_log = logging.getLogger(__name__)


def log_sizes(engine: Engine) -> None:
    """Both caches in tokens, and how many of the longest requests they hold at once."""
    scheduler, loads = engine.scheduler, loads_of(engine)
    length = scheduler.config.max_model_len
    on_gpu, on_cpu = concurrency(scheduler.blocks, scheduler.policy.places, length)
    for name, tokens in (("GPU", loads.gpu.total), ("CPU", loads.cpu.total)):
        fields = {f"{name.lower()}_kv_cache_tokens": tokens}
        _log.info("%s KV cache size: %s tokens", name, f"{tokens:,}", extra={"fields": fields})
    _log.info(
        "Maximum concurrency for %s tokens per request: %.2fx (GPU %.2fx, CPU %.2fx)",
        f"{length:,}",
        on_gpu + on_cpu,
        on_gpu,
        on_cpu,
        extra={"fields": {"max_concurrency_gpu": on_gpu, "max_concurrency_cpu": on_cpu}},
    )


@dataclass(frozen=True, slots=True)
class _Totals:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    gpu_decodes: int
    cpu_decodes: int
    preemptions: int


class StatsLog:
    """Rates between one line and the next; silent while nothing happens."""

    def __init__(
        self, engine: Engine, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._clock = clock
        self._last = self._totals()
        self._was_busy = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.log()

    def log(self) -> None:
        """One line, unless the server has been idle since the last."""
        now, last = self._totals(), self._last
        self._last = now
        loads = loads_of(self._engine)
        is_busy = bool(loads.running or loads.waiting) or now.output_tokens > last.output_tokens
        if not (is_busy or self._was_busy):
            return
        self._was_busy = is_busy
        seconds = max(now.at_s - last.at_s, 1e-9)
        prompt = (now.prompt_tokens - last.prompt_tokens) / seconds
        generation = (now.output_tokens - last.output_tokens) / seconds
        on_cpu = now.cpu_decodes - last.cpu_decodes
        decodes = on_cpu + now.gpu_decodes - last.gpu_decodes
        share = on_cpu / decodes if decodes else 0.0
        fields = {
            "prompt_tokens_per_s": round(prompt, 1),
            "generation_tokens_per_s": round(generation, 1),
            "running": loads.running,
            "running_on_cpu": loads.running_on_cpu,
            "waiting": loads.waiting,
            "kv_cache_usage": round(loads.gpu.share, 4),
            "cpu_kv_cache_usage": round(loads.cpu.share, 4),
            "cpu_decode_share": round(share, 4),
            "preemptions": now.preemptions - last.preemptions,
        }
        _log.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs (%d on the CPU), Waiting: %d reqs, GPU KV cache usage: %.1f%%, "
            "CPU KV cache usage: %.1f%%, Decodes on the CPU: %.1f%%, Preemptions: %d",
            *(prompt, generation, loads.running, loads.running_on_cpu, loads.waiting),
            *(100 * loads.gpu.share, 100 * loads.cpu.share, 100 * share, fields["preemptions"]),
            extra={"fields": fields},
        )

    def _totals(self) -> _Totals:
        metrics = self._engine.scheduler.metrics
        return _Totals(
            at_s=self._clock(),
            prompt_tokens=self._engine.latencies.num_prompt_tokens,
            output_tokens=metrics.num_output_tokens,
            gpu_decodes=metrics.num_gpu_decodes,
            cpu_decodes=metrics.num_cpu_decodes,
            preemptions=metrics.num_preemptions,
        )
