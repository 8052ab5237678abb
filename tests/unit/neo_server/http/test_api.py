from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from neo_server import __version__
from neo_server.tokenizer import NoTokenizer
from tests.unit.neo_server.http.conftest import Rig, serve
from tests.unit.neo_server.test_tokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS["byte level"]
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the"}]


async def test_the_model_is_listed_and_found_by_its_name() -> None:
    async with serve(served_model_name="org/tiny") as rig:
        models = (await rig.client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["org/tiny"]
        assert models["data"][0]["max_model_len"] == 64
        assert (await rig.client.get("/v1/models/org/tiny")).json() == models["data"][0]
        for reply in (
            await rig.client.get("/v1/models/other"),
            await rig.client.post("/v1/completions", json={"model": "other", "prompt": "a"}),
        ):
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "model_not_found"


async def test_tokens_of_a_text_and_back(rig: Rig) -> None:
    reply = await rig.client.post("/tokenize", json={"prompt": "the fox é"})
    ids = reply.json()["tokens"]
    assert ids == TOKENIZER.encode("the fox é")
    bare = {"prompt": "the fox é", "add_special_tokens": False}
    assert (await rig.client.post("/tokenize", json=bare)).json()["tokens"] == ids[1:]
    back = await rig.client.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "<s>the fox é"}
    wrong = await rig.client.post("/detokenize", json={"tokens": [5, 400]})
    assert wrong.status_code == 400
    assert "400" in wrong.json()["error"]["message"]


async def test_health_follows_the_server(rig: Rig) -> None:
    async def status() -> int:
        return (await rig.client.get("/health")).status_code

    assert await status() == 200
    rig.state.gpu.is_ready = False  # type: ignore[misc]
    assert await status() == 503
    rig.state.gpu.is_ready = True  # type: ignore[misc]
    await rig.engine.drain(0.0)
    assert await status() == 503
    reply = await rig.client.post("/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 503
    rig.state.engine, engine = None, rig.state.engine
    assert await status() == 503
    assert (await rig.client.get("/metrics")).status_code == 200
    reply = await rig.client.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, "loading" in reply.text) == (503, True)
    rig.state.engine = engine


async def test_metrics_are_those_of_the_engine(rig: Rig) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 5}
    assert (await rig.client.post("/v1/completions", json=body)).status_code == 200
    reply = await rig.client.get("/metrics")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert samples["neo:generation_tokens_total"] == 5
    assert samples["neo:prompt_tokens_total"] == 3
    assert samples["neo:inter_token_latency_seconds_count"] == 4


async def test_with_an_api_key_only_health_metrics_and_version_answer_without_it() -> None:
    async with serve(api_key="sesame") as rig:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            reply = await rig.client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert "sesame" not in reply.text
            for path in ("/tokenize", "/detokenize", CHAT):
                assert (await rig.client.post(path, json={}, headers=headers)).status_code == 401
            assert (await rig.client.get("/v1/models", headers=headers)).status_code == 401
        key = {"Authorization": "Bearer sesame"}
        reply = await rig.client.post("/v1/completions", json=body, headers=key)
        assert reply.status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await rig.client.get(path)).status_code == 200
        assert (await rig.client.get("/version")).json() == {"version": __version__}


PROMPT: dict[str, Any] = {"prompt": "the"}
BAD = [
    ("/v1/completions", {}, "prompt", ["prompt"]),
    ("/v1/completions", {"prompt": []}, "prompt", ["token ids"]),
    ("/v1/completions", {"prompt": 5}, "prompt", ["5"]),
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt", ["token ids"]),
    ("/v1/completions", {"prompt": [1, -2]}, "prompt", ["-2"]),
    ("/v1/completions", {"prompt": [True]}, "prompt", ["True"]),
    ("/v1/completions", {"prompt": [[]]}, "prompt", ["0 tokens"]),
    ("/v1/completions", {"prompt": [400]}, "prompt", ["400", "vocab_size"]),
    ("/v1/completions", {"prompt": [5] * 64}, "prompt", ["64", "max_model_len"]),
    ("/v1/completions", {"prompt": "a\ud800"}, "prompt", ["surrogate"]),
    ("/v1/completions", PROMPT | {"stop": "a\ud800"}, "stop", ["nicode"]),
    ("/v1/completions", PROMPT | {"stop": [""]}, "stop", ["empty"]),
    ("/v1/completions", PROMPT | {"stop": ["x"] * 10_000}, "stop", ["10000", "64"]),
    ("/v1/completions", PROMPT | {"max_tokens": 0}, "max_tokens", ["0", ">= 1"]),
    ("/v1/completions", PROMPT | {"max_tokens": -1}, "max_tokens", ["-1"]),
    ("/v1/completions", PROMPT | {"max_tokens": 2**40}, "max_tokens", [str(2**40)]),
    ("/v1/completions", PROMPT | {"max_tokens": "many"}, "max_tokens", ["many"]),
    ("/v1/completions", PROMPT | {"temperature": -1}, "temperature", ["-1", ">= 0"]),
    ("/v1/completions", PROMPT | {"temperature": float("nan")}, "temperature", ["nan"]),
    ("/v1/completions", PROMPT | {"temperature": float("inf")}, "temperature", ["inf"]),
    ("/v1/completions", PROMPT | {"temperature": 1e300}, "temperature", ["inf"]),
    ("/v1/completions", PROMPT | {"top_p": 1.5}, "top_p", ["1.5"]),
    ("/v1/completions", PROMPT | {"top_k": -2}, "top_k", ["-2"]),
    ("/v1/completions", PROMPT | {"seed": 2**70}, "seed", [str(2**70)]),
    ("/v1/completions", PROMPT | {"stop_token_ids": [400]}, "stop_token_ids", ["400"]),
    ("/v1/completions", PROMPT | {"n": 129}, "n", ["129", "128"]),
    ("/v1/completions", PROMPT | {"n": 2, "temperature": 0}, "n", ["2", "temperature"]),
    ("/v1/completions", PROMPT | {"best_of": 2}, "best_of", ["2"]),
    ("/v1/completions", PROMPT | {"suffix": "a"}, "suffix", ["'a'"]),
    ("/v1/completions", PROMPT | {"logprobs": 21}, "logprobs", ["21", "20"]),
    ("/v1/completions", PROMPT | {"logprobs": True}, "logprobs", ["True"]),
    ("/v1/completions", PROMPT | {"logit_bias": {"a": 1}}, "logit_bias", ["a"]),
    ("/v1/completions", PROMPT | {"logit_bias": {"5": 101}}, "logit_bias", ["5", "101", "100"]),
    ("/v1/completions", PROMPT | {"logit_bias": {"400": 1}}, "logit_bias", ["400", "vocab_size"]),
    ("/v1/completions", PROMPT | {"presence_penalty": 3}, "presence_penalty", ["3", "[-2, 2]"]),
    (
        "/v1/completions",
        PROMPT | {"repetition_penalty": float("inf")},
        "repetition_penalty",
        ["inf"],
    ),
    (
        "/v1/completions",
        PROMPT | {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        ["1", "stream"],
    ),
    ("/v1/completions", PROMPT | {"priority": 2**31}, "priority", [str(2**31)]),
    (
        "/v1/completions",
        PROMPT | {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        ["0", ">= 1"],
    ),
    ("/v1/completions", PROMPT | {"temprature": 1}, "temprature", ["temprature"]),
    ("/v1/completions", PROMPT | {"stream_options": {}}, "stream_options", ["stream"]),
    (CHAT, {}, "messages", ["messages"]),
    (CHAT, {"messages": []}, "messages", ["messages"]),
    (CHAT, {"messages": [{"content": "a"}]}, "messages", ["role"]),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", []),
    (CHAT, {"messages": [{"role": "\ud800", "content": "a"}]}, "messages", ["nicode"]),
    (CHAT, {"messages": HELLO, "logprobs": 5}, "logprobs", ["5"]),
    (CHAT, {"messages": HELLO, "top_logprobs": 5}, "top_logprobs", ["5", "logprobs"]),
    (CHAT, {"messages": HELLO, "echo": True}, "echo", ["True"]),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", ["function"]),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", []),
    ("/v1/completions", {"prompt": "x" * 5_000_000}, "prompt", ["5000000", "max_model_len"]),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 5_000_000}]},
        "prompt",
        ["max_model_len"],
    ),
    ("/v1/completions", {"prompt": "a", "n": "x" * 5_000_000}, "n", ["xxx"]),
    ("/tokenize", {"prompt": 5}, None, []),
    ("/tokenize", {"prompt": "\ud800"}, None, []),
    ("/v1/completions", PROMPT | {"\ud800": 1}, None, []),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
async def test_a_bad_field_is_refused_by_name_and_harms_nobody(
    rig: Rig, path: str, body: dict[str, Any], param: str | None, words: list[str]
) -> None:
    reply = await rig.client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    for word in words:
        assert word in error["message"]
    assert len(error["message"]) < 400
    good = {"prompt": "the", "max_tokens": 2}
    assert (await rig.client.post("/v1/completions", json=good)).status_code == 200


async def test_fields_that_ask_for_nothing_are_taken(rig: Rig) -> None:
    body: dict[str, Any] = PROMPT | {"n": 1, "best_of": 1, "logprobs": None, "echo": False}
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "user": "me"}
    body |= {"max_tokens": 2, "temperature": 0, "stop": None, "suffix": None, "seed": -1}
    assert (await rig.client.post("/v1/completions", json=body)).status_code == 200
    body = {"messages": HELLO, "tools": [], "response_format": {"type": "text"}, "max_tokens": 2}
    assert (await rig.client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b'{"prompt": "\xff"}', 400, ""),
        (b"[]", 400, ""),
        (b" " * (17 << 20), 413, str(1 << 24)),
    ],
)
async def test_a_body_that_is_none_is_refused(
    rig: Rig, content: bytes, status: int, word: str
) -> None:
    headers = {"content-type": "application/json"}
    reply = await rig.client.post("/v1/completions", content=content, headers=headers)
    assert reply.status_code == status
    assert word in reply.json()["error"]["message"]


async def test_a_long_body_in_parts_is_cut_off(rig: Rig) -> None:
    async def parts() -> Any:
        for _ in range(18):
            yield b" " * (1 << 20)

    reply = await rig.client.post("/v1/completions", content=parts())
    assert reply.status_code == 413


async def test_the_routes_describe_themselves(rig: Rig) -> None:
    paths = (await rig.client.get("/openapi.json")).json()["paths"]
    assert {"/v1/completions", CHAT, "/v1/models", "/health", "/metrics"} <= set(paths)


async def test_other_paths_and_methods_have_openais_form_too(rig: Rig) -> None:
    for reply, status in (
        (await rig.client.get("/v1/nothing"), 404),
        (await rig.client.get("/v1/completions"), 405),
    ):
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_an_error_of_ours_is_answered_with_500_and_the_next_request_is_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "submit_all", lambda *_: 1 / 0)
        reply = await rig.client.post("/v1/completions", json=PROMPT)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "internal error: ZeroDivisionError"
    assert (await rig.client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    async with serve(tokenizer=NoTokenizer(), template=None) as rig:
        for path, body in (
            ("/v1/completions", PROMPT),
            (CHAT, {"messages": HELLO}),
            ("/tokenize", PROMPT),
            ("/detokenize", {"tokens": [5]}),
        ):
            reply = await rig.client.post(path, json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
        reply = await rig.client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
        assert reply.json()["usage"]["completion_tokens"] == 2
