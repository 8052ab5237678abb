"""The engine's state as Prometheus sees it, read when it is scraped; names follow vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from neo_server.engine import Engine
from neo_server.latencies import Histogram
from neo_server.loads import loads_of
from neo_server.shared_memory import WorkerEntry
from neo_server.state import ServerState

_PREFIX = "neo:"


class CpuSeconds:
    """Seconds of all cpu-attention workers ever, although a worker's row leaves with it.

    What a worker does between the last reading and its end is lost.
    """

    def __init__(self) -> None:
        self._of_the_gone = 0.0
        self._seen: dict[tuple[int, int], float] = {}  # by row and pid

    def total(self, entries: Iterable[WorkerEntry]) -> float:
        """Seconds of threads inside the kernels; never less than before."""
        now = {(entry.row, entry.pid): entry.busy_s for entry in entries}
        for key, seconds in self._seen.items():
            if now.get(key, -1.0) < seconds:
                self._of_the_gone += seconds
        self._seen = now
        return self._of_the_gone + sum(now.values())


class EngineCollector(Collector):
    """Every family has the label ``model_name``; nothing before the engine is ready."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._cpu = CpuSeconds()

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        engine = self._state.engine
        if engine is None:
            return
        yield from self._gauges(engine)
        yield from self._counters(engine)
        yield from self._histograms(engine)

    def _gauges(self, engine: Engine) -> Iterator[Metric]:
        loads = loads_of(engine)
        for name, text, value in (
            ("num_requests_running", "Requests that hold cache.", loads.running),
            ("num_requests_waiting", "Requests that hold none.", loads.waiting),
            (
                "num_requests_cpu",
                "Of those running, with their cache on the CPU.",
                loads.running_on_cpu,
            ),
            ("num_tokens_waiting", "Of waiting requests.", loads.waiting_tokens),
            ("kv_cache_usage_perc", "Of the GPU-cache; 1 is full.", loads.gpu.share),
            ("cpu_kv_cache_usage_perc", "Of the CPU-cache; 1 is full.", loads.cpu.share),
            (
                "cost_model_error_ratio",
                "Median of |predicted - measured| / measured of the latest iterations.",
                engine.scheduler.cost.median_error,
            ),
            (
                "cpu_attn_workers",
                "Workers that are planned with.",
                self._state.memory.cpu_pool.live_workers(),
            ),
        ):
            yield self._gauge(name, text, value)

    def _counters(self, engine: Engine) -> Iterator[Metric]:
        metrics, latencies = engine.scheduler.metrics, engine.latencies
        token_bytes = self._token_bytes()
        for name, text, value in (
            ("prompt_tokens", "Of requests that have a token.", latencies.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", metrics.num_output_tokens),
            ("num_preemptions", "Requests that lost their cache.", metrics.num_preemptions),
            ("gpu_decodes", "Decode steps with attention on the GPU.", metrics.num_gpu_decodes),
            ("cpu_decodes", "Decode steps with attention on the CPU.", metrics.num_cpu_decodes),
            ("swap_out_bytes", "GPU to CPU.", metrics.num_swap_out_tokens * token_bytes),
            ("swap_in_bytes", "CPU to GPU.", metrics.num_swap_in_tokens * token_bytes),
            ("gpu_worker_restarts", "Gpu workers lost.", metrics.num_gpu_worker_restarts),
            (
                "cpu_attention_seconds",
                "Of the cpu-attention workers' threads, in kernels.",
                self._cpu.total(self._state.memory.workers()),
            ),
        ):
            yield self._counter(name, text, {"": value})
        text = "Requests that ended."
        yield self._counter("request_success", text, latencies.finished, "finished_reason")
        yield self._counter("iterations", "By kind of plan.", metrics.iterations, "plan")

    def _histograms(self, engine: Engine) -> Iterator[Metric]:
        latencies = engine.latencies
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From submission.", latencies.first_token),
            ("inter_token_latency_seconds", "Between tokens.", latencies.inter_token),
            ("e2e_request_latency_seconds", "From submission to the end.", latencies.e2e),
            ("request_queue_time_seconds", "Before the first plan.", latencies.queue),
            (
                "handoff_wait_seconds",
                "Of an iteration: the device waits for the cpu-attention workers.",
                latencies.handoff_wait,
            ),
        ):
            yield self._histogram(name, text, {"": histogram})
        text = "Of an iteration, by stage, on the device."
        yield self._histogram("gpu_stage_seconds", text, latencies.stages, "stage")

    def _token_bytes(self) -> int:
        """K and V of a token as they are moved: in the GPU-cache's type."""
        resolved = self._state.resolved
        return resolved.model.kv_bytes_per_token(resolved.config.worker.dtype.itemsize)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._state.model_name], value)
        return family

    def _counter(
        self, name: str, text: str, values: dict[str, float] | dict[str, int], label: str = ""
    ) -> Metric:
        """The samples' names end in ``_total``."""
        family = CounterMetricFamily(_PREFIX + name, text, labels=_non_empty("model_name", label))
        for key, value in values.items():
            family.add_metric(_non_empty(self._state.model_name, key), value)
        return family

    def _histogram(
        self, name: str, text: str, values: dict[str, Histogram], label: str = ""
    ) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=_non_empty("model_name", label))
        for key, histogram in values.items():
            labels = _non_empty(self._state.model_name, key)
            family.add_metric(labels, _buckets(histogram), histogram.sum)
        return family


def _non_empty(*values: str) -> list[str]:
    return [value for value in values if value]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bound and cumulative count."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def make_registry(state: ServerState) -> CollectorRegistry:
    """The engine's metrics, and this process's own (``process_``, ``python_``)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(EngineCollector(state))
    return registry
