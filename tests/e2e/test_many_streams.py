from __future__ import annotations

from pathlib import Path

from tests.e2e.prompts import PROMPTS
from tests.helpers.server import request_of, running_server

STREAMS = 32
NEW_TOKENS = 32


def test_more_streams_than_the_gpu_cache_holds_all_finish_through_two_worker_processes(
    demo_model: Path, tmp_path: Path
) -> None:
    prompts = [PROMPTS[i % 18] for i in range(STREAMS)]
    # The longest of these prompts has 40 tokens: (40 + 32) / 16 = 5 blocks a request, for 4.
    flags = ("--num-gpu-blocks-override", "20", "--kv-offloading-size", "0.2")
    with running_server(
        demo_model, tmp_path, *flags, "--max-model-len", "320", "--cpu-attn-workers", "2"
    ) as server:
        results = server.generate_all([request_of(prompt, NEW_TOKENS) for prompt in prompts])
        assert all(result.finish.num_output_tokens == NEW_TOKENS for result in results)
        assert sum(result.finish.num_cpu_decodes for result in results) > 0
        assert sum(result.finish.num_gpu_decodes for result in results) > 0
        server.assert_caches_end_empty()
        # The worker rows are refreshed a few times a second.
        server.wait_until(
            "sum(w.tasks > 0 for w in info.workers if w.kind == pb.WorkerInfo.KIND_CPU_ATTN) >= 2"
        )
        loads = server.loads()
        assert loads.num_running_reqs == loads.num_waiting_reqs == 0


def test_the_same_prompt_gives_the_same_tokens_on_every_stream(
    demo_model: Path, tmp_path: Path
) -> None:
    flags = ("--scheduling-policy", "mixed", "--num-gpu-blocks-override", "64")
    with running_server(demo_model, tmp_path, *flags) as server:
        request = request_of(PROMPTS[3], NEW_TOKENS)
        results = server.generate_all([request] * 8)
        assert {tuple(result.token_ids) for result in results} == {tuple(results[0].token_ids)}
        assert {result.finish.num_cpu_decodes > 0 for result in results} == {True, False}
