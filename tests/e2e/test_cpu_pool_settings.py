"""Settings of the CPU-attention pool through the command line: int8 cache, leased cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neo_native import cores
from protos import inference_pb2
from tests.e2e.prompts import PROMPTS
from tests.helpers.server import RunningServer, request_of, running_server

SMALL = ("--max-model-len", "256", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64")


def pinned_threads(server: RunningServer) -> list[set[int]]:
    """Affinity of every thread of the cpu workers that may not run everywhere."""
    everywhere = os.sched_getaffinity(0)
    found = []
    for pid in server.cpu_worker_pids():
        for task in Path(f"/proc/{pid}/task").iterdir():
            affinity = os.sched_getaffinity(int(task.name))
            if affinity != everywhere:
                found.append(affinity)
    return found


def test_an_int8_cache_has_more_pages_and_serves_the_same_tokens_every_time(
    demo_model: Path, tmp_path: Path
) -> None:
    flags = ("--scheduling-policy", "simple-offload", "--cpu-kv-cache-dtype", "int8", *SMALL)
    with running_server(demo_model, tmp_path, *flags, "--kv-offloading-size", "0.2") as server:
        # A page of 64 tokens: K and V of 30 layers and 3 heads, 64 elements and a scale each.
        info = server.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert info.num_cpu_pages == int(0.2 * 2**30) // (64 * 2 * 30 * 3 * (64 + 4))
        for prompt in PROMPTS[:2]:  # one at a time: the batch is the same, so are all bits
            first, second = (server.generate(request_of(prompt, 24)) for _ in range(2))
            assert first.token_ids == second.token_ids
            assert first.finish.num_cpu_decodes > 0
        server.assert_caches_end_empty()


@pytest.mark.skipif(len(cores.usable()) < 2, reason="one core: nothing can be reserved")
def test_attention_threads_are_pinned_beside_the_reserved_cores(
    demo_model: Path, tmp_path: Path
) -> None:
    flags = ("--cpu-attn-workers", "1", "--cpu-attn-threads", "1", "--reserved-cores", "1")
    with running_server(demo_model, tmp_path, *flags, *SMALL) as server:
        assert pinned_threads(server) == [{cores.usable()[1]}]
        # All cores but the reserved one are leased: whoever comes now finds too few.
        if len(cores.usable()) == 2:
            late = server.start_worker("--pin")
            server.wait_until(f"any(w.pid == {late.pid} for w in info.workers)")
            server.wait_for_log("0 of 1 threads found a free core")
