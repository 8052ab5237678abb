from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from neo_server.engine import Engine
from neo_server.prometheus import CpuSeconds, make_registry
from neo_server.shared_memory import WorkerEntry
from protos.config import DType
from protos.model_config import parse_model_config
from tests.unit.neo_server.conftest import CONFIG
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import TOKENIZER, read, submit

MODEL = parse_model_config(CONFIG, {})


def entry(row: int, pid: int, busy_s: float) -> WorkerEntry:
    return WorkerEntry(row, pid, 1, 0, busy_s, 0, 0)


def state_of(engine: Engine | None) -> Any:
    worker = SimpleNamespace(dtype=DType.FLOAT16)
    return SimpleNamespace(
        engine=engine,
        model_name="tiny",
        memory=SimpleNamespace(
            workers=lambda: [entry(0, 7, 1.5)], cpu_pool=SimpleNamespace(live_workers=lambda: 3)
        ),
        resolved=SimpleNamespace(model=MODEL, config=SimpleNamespace(worker=worker)),
    )


def samples(state: Any) -> dict[str, dict[tuple[str, ...], float]]:
    """By sample name, then by label values other than the model's."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(make_registry(state)).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("neo:"):
                assert labels.pop("model_name") == "tiny"
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


async def test_a_scrape_shows_what_the_engine_did() -> None:
    simulation = Simulation(Sizes(policy="mixed"))
    engine = Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100)
    for seed in range(6):
        submit(engine, seed, [seed, 7, 9])
    before = samples(state_of(engine))
    assert before["neo:num_requests_waiting"] == {(): 6.0}
    assert before["neo:num_tokens_waiting"] == {(): 18.0}
    task = asyncio.create_task(engine.run())
    streams = [request.stream for request in list(engine._by_sequence.values())]
    while not engine.scheduler.metrics.num_cpu_decodes:
        await asyncio.sleep(0)
    during = samples(state_of(engine))
    assert during["neo:num_requests_running"][()] > 0
    assert during["neo:num_requests_cpu"][()] > 0
    assert 0 < during["neo:cpu_kv_cache_usage_perc"][()] <= 1
    await asyncio.gather(*map(read, streams))
    task.cancel()
    after = samples(state_of(engine))
    assert after["neo:num_requests_running"] == after["neo:num_requests_waiting"] == {(): 0.0}
    assert after["neo:kv_cache_usage_perc"] == after["neo:cpu_kv_cache_usage_perc"] == {(): 0.0}
    assert after["neo:prompt_tokens_total"] == {(): 18.0}
    assert after["neo:generation_tokens_total"] == {(): 48.0}
    assert after["neo:request_success_total"] == {
        ("stop",): 0.0,
        ("length",): 6.0,
        ("abort",): 0.0,
        ("error",): 0.0,
    }
    metrics = engine.scheduler.metrics
    assert after["neo:iterations_total"] == {(k,): v for k, v in metrics.iterations.items()}
    assert after["neo:num_preemptions_total"] == {(): metrics.num_preemptions}
    token_bytes = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes
    assert after["neo:swap_out_bytes_total"] == {(): metrics.num_swap_out_tokens * token_bytes}
    assert after["neo:swap_in_bytes_total"] == {(): metrics.num_swap_in_tokens * token_bytes}
    assert metrics.num_swap_outs == 0 or metrics.num_swap_out_tokens >= metrics.num_swap_outs
    assert after["neo:cpu_attention_seconds_total"] == {(): 1.5}
    assert after["neo:cpu_attn_workers"] == {(): 3.0}
    for name, count in (
        ("time_to_first_token_seconds", 6),
        ("inter_token_latency_seconds", 6 * 7),
        ("e2e_request_latency_seconds", 6),
        ("request_queue_time_seconds", 6),
    ):
        assert after[f"neo:{name}_count"] == {(): count}
        assert after[f"neo:{name}_bucket"][("+Inf",)] == count
        values = list(after[f"neo:{name}_bucket"].values())
        assert values == sorted(values)
        assert after[f"neo:{name}_sum"][()] >= 0
    assert set(after["neo:gpu_stage_seconds_count"]) == {
        (name,) for name in ("linear", "gpu_attn", "handoff", "swap", "head")
    }
    assert {"neo:handoff_wait_seconds_count", "neo:cost_model_error_ratio"} <= set(after)


def test_before_the_engine_is_ready_there_are_only_the_process_own() -> None:
    names = set(samples(state_of(None)))
    assert "process_resident_memory_bytes" in names
    assert not any(name.startswith("neo:") for name in names)


def test_cpu_seconds_never_fall_when_workers_leave_and_others_take_their_rows() -> None:
    total = CpuSeconds()
    assert total.total([entry(0, 1, 2.0), entry(1, 2, 3.0)]) == 5.0
    assert total.total([entry(1, 2, 4.0)]) == 6.0
    assert total.total([entry(0, 3, 0.5), entry(1, 2, 4.0)]) == 6.5
    assert total.total([]) == pytest.approx(6.5)
