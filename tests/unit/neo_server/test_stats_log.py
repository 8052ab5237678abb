from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path

import pytest

from neo_server.engine import Engine
from neo_server.stats_log import StatsLog, log_sizes
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import Process, request_of, tokens_of
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import TOKENIZER, read, submit


def engine_of(sizes: Sizes) -> Engine:
    simulation = Simulation(sizes)
    return Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100)


@pytest.mark.parametrize(("policy", "on_cpu"), [("mixed", 2.0), ("gpu-only", 0.0)])
async def test_sizes_are_logged_in_tokens(
    caplog: pytest.LogCaptureFixture, policy: str, on_cpu: float
) -> None:
    caplog.set_level(logging.INFO)
    sizes = Sizes(policy=policy)
    engine = engine_of(sizes)
    blocks, length = engine.scheduler.blocks, engine.scheduler.config.max_model_len
    per_request = -(-length // blocks.block_size), -(-length // blocks.page_size)
    log_sizes(engine)
    gpu = blocks.blocks.total / per_request[0]
    cpu = blocks.pages.total / per_request[1] if on_cpu else 0.0
    assert [record.getMessage() for record in caplog.records] == [
        f"GPU KV cache size: {blocks.blocks.total * blocks.block_size:,} tokens",
        f"CPU KV cache size: {blocks.pages.total * blocks.page_size:,} tokens",
        f"Maximum concurrency for {length:,} tokens per request: "
        f"{gpu + cpu:.2f}x (GPU {gpu:.2f}x, CPU {cpu:.2f}x)",
    ]


async def test_rates_are_those_since_the_last_line_and_idleness_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = engine_of(Sizes(policy="mixed"))
    now = 0.0
    stats = StatsLog(engine, 10.0, lambda: now)
    stats.log()
    assert caplog.records == []
    streams = [submit(engine, seed, [seed, 7, 9]) for seed in range(4)]
    task = asyncio.create_task(engine.run())
    outputs = [await read(stream) for stream in streams]
    count = sum(len(output.token_ids) for output in outputs)
    now = 2.0
    stats.log()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        f"Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: {count / 2:.1f} tokens/s"
    )
    assert "Running: 0 reqs (0 on the CPU), Waiting: 0 reqs" in line
    now = 4.0
    stats.log()  # the last of a busy time
    assert "Avg generation throughput: 0.0 tokens/s" in caplog.records[-1].getMessage()
    now = 6.0
    stats.log()
    assert len(caplog.records) == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_json_lines_of_the_server_and_its_workers(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--log-format", "json", "--log-stats-interval", "0.1", "--cpu-attn-workers", "1")
    process = Process(tiny_model, tmp_path, *flags)
    try:
        process.worker()
        process.until(process.address_file.exists)
        stream = process.stub.Generate(request_of([1, 2], 40, 3), timeout=60.0)
        assert tokens_of(stream) == generate(3, [1, 2], 40)
        process.until(lambda: "Avg generation throughput" in process.log_path.read_text())
        process.until(lambda: '"cpu_attn_worker"' in process.log_path.read_text())
        loads = process.loads()
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20.0) == 0
        lines = [json.loads(line) for line in process.log_path.read_text().splitlines()]
        assert {"neo_server", "cpu_attn_worker"} <= {line["process"] for line in lines}
        found = {key: value for line in lines for key, value in line.items()}
        assert found["gpu_kv_cache_tokens"] == loads.max_total_num_tokens == 40 * 16
        assert found["cpu_kv_cache_tokens"] == loads.max_total_num_cpu_tokens > 0
        rates = [line["generation_tokens_per_s"] for line in lines if "running" in line]
        assert max(rates) > 0
        assert found["configuration"]["scheduling policy"] == "mixed"
    finally:
        process.close()
