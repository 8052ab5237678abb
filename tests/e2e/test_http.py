"""The HTTP API of a real server with the demo model: plain HTTP and the official client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from protos import inference_pb2 as pb
from tests.helpers.server import RunningServer, request_of, running_server

MAX_SEQS, MAX_QUEUED, MAX_LEN = 4, 2, 512
PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "demo"


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--http-port", "0", "--max-model-len", str(MAX_LEN), "--served-model-name", MODEL]
    flags += ["--max-num-seqs", str(MAX_SEQS), "--max-num-queued-reqs", str(MAX_QUEUED)]
    with running_server(demo_model, tmp_path_factory.mktemp("http"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: RunningServer) -> str:
    return f"http://{server.http_address}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def samples_of(url: str) -> dict[str, float]:
    """By name and the labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60.0).text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[":".join([sample.name, *labels])] = sample.value
    return found


def test_plain_http_gives_the_text_that_grpc_gives(server: RunningServer, url: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240.0) as reply:
        answer = json.load(reply)
    expected = server.generate(request_of(PROMPT, 12, ignore_eos=False))
    assert "Paris" in expected.text
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def test_server_sent_events_joined_are_the_whole(url: str) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=240.0).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240.0) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["usage"] == whole["usage"]
    assert len(events) > 3  # it came in parts
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == whole["choices"][0]["text"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_streams_a_chat(url: str) -> None:
    body = json.dumps({"messages": CHAT, "max_tokens": 8, "temperature": 0, "stream": True})
    command = ["curl", "-sSN", f"{url}/v1/chat/completions", "-d", body]
    command += ["-H", "Content-Type: application/json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240.0, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] in ("stop", "length")


def test_the_official_client_completes_chats_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    done = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert "Paris" in done.choices[0].text
    chat: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**chat)
    assert whole.choices[0].message.role == "assistant"
    assert "Paris" in (whole.choices[0].message.content or "")
    chunks = list(
        client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_a_chat_prompt_is_what_transformers_makes_of_it(url: str, demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "system", "content": "Be brief. é 안녕"}, *CHAT]
    expected = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    body = httpx.post(f"{url}/tokenize", json={"messages": messages}, timeout=60.0).json()
    assert body["tokens"] == list(expected)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert httpx.post(f"{url}/detokenize", json={"tokens": body["tokens"]}).json() == {
        "prompt": text
    }


def test_a_stop_string_ends_a_chat_before_it(client: openai.OpenAI) -> None:
    chat: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 30}
    free = client.chat.completions.create(**chat).choices[0].message.content or ""
    stop = free[6:10]
    found = client.chat.completions.create(**chat, stop=[stop]).choices[0]
    assert found.message.content == free[: free.index(stop)]
    assert found.finish_reason == "stop"


def test_the_official_client_gets_several_choices_with_log_probabilities(
    client: openai.OpenAI,
) -> None:
    chat: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "seed": 4}
    chat |= {"n": 2, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**chat)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 12
    joined: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**chat, stream=True):
        for part in chunk.choices:
            joined[part.index] += (part.logprobs and part.logprobs.content) or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert joined[choice.index] == content
        data = b"".join(bytes(entry.bytes or []) for entry in content)
        assert data.decode(errors="replace").startswith(choice.message.content or "")
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        assert all(entry.logprob <= 0.0 for entry in content)


def test_an_echoed_prompt_is_scored_by_the_official_client(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    (choice,) = done.choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert choice.text == "".join(told.tokens)
    assert choice.text.startswith(PROMPT)
    offsets = [sum(map(len, told.tokens[:i])) for i in range(len(told.tokens))]
    assert told.text_offset == offsets
    assert told.token_logprobs[0] is None
    for token, own, top in zip(
        told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True
    ):
        assert top[token] == own
        assert own <= max(top.values())
        assert 2 <= len(top) <= 3


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1.0)
    assert caught.value.param == "temperature"
    assert "-1" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, n=3, temperature=0)  # type: ignore[arg-type]
    assert caught.value.param == "n"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * (MAX_LEN + 1))
    assert str(MAX_LEN) in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="another", prompt=PROMPT)
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_both_caches(
    server: RunningServer, url: str, stream: bool
) -> None:
    aborted = samples_of(url)["neo:request_success_total:abort"]
    body = {"prompt": PROMPT, "max_tokens": MAX_LEN, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240.0) as reply:
            next(reply.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(30.0, read=0.5))
    server.wait_until("loads.num_running_reqs == 0 and loads.num_waiting_reqs == 0")
    server.assert_caches_end_empty()
    assert samples_of(url)["neo:request_success_total:abort"] == aborted + 1


def test_over_the_queues_limit_requests_are_refused_and_later_served(
    server: RunningServer, client: openai.OpenAI
) -> None:
    def start() -> Any:
        return server.stub.Generate(request_of([5, 6, 7], 400), timeout=240.0)

    streams = [start() for _ in range(MAX_QUEUED)]
    for i in range(MAX_QUEUED, MAX_SEQS + 1):  # never more at once than may wait
        server.wait_until(f"loads.num_running_reqs == {i}")
        if i < MAX_SEQS:
            streams.append(start())
    (gpu,) = (w.pid for w in server.info().workers if w.kind == pb.WorkerInfo.KIND_GPU)
    os.kill(gpu, signal.SIGSTOP)
    try:
        streams += [start() for _ in range(MAX_QUEUED)]
        server.wait_until(f"loads.num_waiting_reqs == {MAX_QUEUED}")
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt=PROMPT)
        assert caught.value.code == "rate_limit_exceeded"
        assert "max_num_queued_reqs" in caught.value.message
    finally:
        os.kill(gpu, signal.SIGCONT)
        for stream in streams:
            stream.cancel()
    server.assert_caches_end_empty()
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2).usage is not None


def test_metrics_count_what_was_served(server: RunningServer, url: str) -> None:
    server.assert_caches_end_empty()
    before = samples_of(url)
    body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=240.0).status_code == 200
    after = samples_of(url)
    for name, more in (
        ("neo:prompt_tokens_total", 3),
        ("neo:generation_tokens_total", 10),
        ("neo:request_success_total:length", 1),
        ("neo:time_to_first_token_seconds_count", 1),
        ("neo:inter_token_latency_seconds_count", 9),
        ("neo:e2e_request_latency_seconds_count", 1),
        ("neo:request_queue_time_seconds_count", 1),
    ):
        assert after[name] - before[name] == more, name
    for name in ("neo:e2e_request_latency_seconds_sum", "neo:gpu_stage_seconds_count:linear"):
        assert after[name] > before[name], name
    assert after["neo:cpu_attn_workers"] == len(server.cpu_worker_pids()) == 2
    assert after["neo:num_requests_running"] == after["neo:kv_cache_usage_perc"] == 0
    loads = server.loads()
    assert after["neo:num_preemptions_total"] == loads.num_preemptions
    assert after["neo:iterations_total:one_batch"] == loads.iterations["one_batch"]
    assert httpx.get(f"{url}/health", timeout=60.0).status_code == 200
    assert httpx.get(f"{url}/version", timeout=60.0).json() == {
        "version": server.stub.GetServerInfo(pb.GetServerInfoRequest()).version
    }
