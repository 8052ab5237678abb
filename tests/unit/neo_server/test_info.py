"""GetLoads, GetModelInfo and GetServerInfo of a running server with a fake gpu worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from neo_server.service_names import SERVICES
from protos import inference_pb2 as pb
from tests.helpers.fake_gpu_worker import generate
from tests.helpers.server_process import Process, request_of, tokens_of
from tests.unit.neo_server.conftest import CONFIG


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    flags = ("--http-port", "0", "--max-num-queued-tokens", "9000", "--max-num-seqs", "8")
    process = Process(tiny_model, tmp_path_factory.mktemp("info"), *flags)
    process.worker()
    process.until(process.address_file.exists)
    yield process
    process.close()


def test_loads_count_requests_and_the_tokens_of_both_caches(server: Process) -> None:
    idle = server.loads()
    assert (idle.num_used_tokens, idle.num_used_cpu_tokens, idle.token_usage) == (0, 0, 0.0)
    assert idle.max_total_num_tokens == idle.num_total_gpu_blocks * idle.block_size == 40 * 16
    pages = idle.num_total_cpu_pages
    assert idle.max_total_num_cpu_tokens == pages * idle.cpu_kv_page_size > 0
    assert (idle.max_model_len, idle.max_running_reqs) == (256, 8)
    streams = [server.stub.Generate(request_of([i] * 20, 230, i), timeout=60.0) for i in range(10)]
    assert all(next(stream).HasField("prompt_info") for stream in streams)
    server.until(lambda: server.loads().num_running_reqs == 8)
    os.kill(server.workers[0].pid, signal.SIGSTOP)
    busy = server.loads()
    assert busy.num_waiting_reqs == 2
    assert busy.num_waiting_tokens == 40
    assert 0 < busy.num_cpu_reqs < 8
    assert busy.num_used_tokens == busy.num_used_gpu_blocks * busy.block_size > 0
    assert busy.token_usage == busy.num_used_tokens / busy.max_total_num_tokens
    assert busy.cpu_token_usage == busy.num_used_cpu_tokens / busy.max_total_num_cpu_tokens > 0
    os.kill(server.workers[0].pid, signal.SIGCONT)
    for i, stream in enumerate(streams):
        assert tokens_of(stream) == generate(i, [i] * 20, 230)
    server.until(server.caches_are_empty)
    after = server.loads()
    assert after.num_prompt_tokens - idle.num_prompt_tokens == 200
    assert after.num_output_tokens - idle.num_output_tokens == 2300


def test_what_a_client_has_to_know_of_the_model(server: Process, tiny_model: Path) -> None:
    info = server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10.0)
    assert info.model == str(tiny_model)
    assert info.model_path == str(tiny_model)
    assert (info.architecture, info.model_type) == ("LlamaForCausalLM", "llama")
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ):
        assert getattr(info, name) == CONFIG[name]
    assert info.head_dim == 16
    assert list(info.eos_token_ids) == [399]
    assert info.has_tokenizer
    assert not info.has_chat_template
    # float32 on the CPU: 2 layers, K and V, 2 heads of 16
    assert info.kv_bytes_per_token == info.cpu_kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_what_a_client_has_to_know_of_the_server(server: Process) -> None:
    info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10.0)
    assert info.status == ""
    assert tuple(info.services) == SERVICES
    assert info.http_address == server.address_file.read_text().split()[2]
    assert info.pid == server.process.pid
    assert (info.uses_tls, info.requires_api_key) == (False, False)
    assert (info.max_num_queued_reqs, info.max_num_queued_tokens) == (4096, 9000)
    assert info.max_tokens_per_request == info.max_model_len == 256
    # 16 blocks of 16 tokens, or 4 pages of 64, hold a request of 256 tokens
    assert info.max_concurrency == info.num_gpu_blocks / 16 + info.num_cpu_pages / 4
    assert (info.kv_cache_dtype, info.cpu_kv_cache_dtype) == ("float32", "float32")
