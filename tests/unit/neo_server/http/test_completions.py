from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from neo_server.errors import GpuWorkerDiedError, NeoError
from tests.helpers.fake_gpu_worker import generate
from tests.unit.neo_server.http.conftest import SIZES, Rig, serve
from tests.unit.neo_server.simulation import Sizes
from tests.unit.neo_server.test_tokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS["byte level"]


def text_of(seed: int, prompt: list[int], count: int) -> str:
    return TOKENIZER.decode(generate(seed, prompt, count))


async def post(rig: Rig, path: str, **body: Any) -> httpx.Response:
    return await rig.client.post(path, json=body)


def events_of(text: str) -> list[dict[str, Any]]:
    """Of a stream that ended as it should."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_text_is_continued_and_counted(rig: Rig) -> None:
    reply = await post(rig, "/v1/completions", model="tiny", prompt="the fox", max_tokens=6, seed=3)
    assert reply.status_code == 200
    body = reply.json()
    ids = TOKENIZER.encode("the fox")
    assert ids[0] == 1
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["text"] == text_of(3, ids, 6)
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert body["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 6,
        "total_tokens": len(ids) + 6,
    }
    await rig.until_free()


async def test_without_max_tokens_a_completion_has_sixteen_and_a_chat_what_fits(rig: Rig) -> None:
    reply = await post(rig, "/v1/completions", prompt=[1, 2, 3])
    assert reply.json()["usage"]["completion_tokens"] == 16
    messages = [{"role": "user", "content": "the"}]
    reply = await post(rig, "/v1/chat/completions", messages=messages)
    assert reply.json()["usage"]["total_tokens"] == SIZES.max_model_len


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_has_the_same_text_and_ends_with_done(rig: Rig, include_usage: bool) -> None:
    body = {"prompt": [5, 6], "max_tokens": 9, "seed": 4, "stream": True}
    reply = await post(
        rig, "/v1/completions", **body, stream_options={"include_usage": include_usage}
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.text)
    if include_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
        assert all(event["usage"] is None for event in events)
    else:
        assert not any("usage" in event for event in events)
    assert "".join(e["choices"][0]["text"] for e in events) == text_of(4, [5, 6], 9)
    assert len({event["id"] for event in events}) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_give_a_choice_each(rig: Rig, stream: bool) -> None:
    prompts = [[seed, 7] for seed in range(5)]
    reply = await post(rig, "/v1/completions", prompt=prompts, max_tokens=7, seed=2, stream=stream)
    texts = [""] * 5
    parts = events_of(reply.text) if stream else [reply.json()]
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [text_of(2, prompt, 7) for prompt in prompts]
    await rig.until_free()


async def test_many_streams_at_once_each_get_their_own_text(rig: Rig) -> None:
    async def one(seed: int) -> str:
        body = {"prompt": [seed, 7], "max_tokens": 20, "seed": seed, "stream": True}
        events = events_of((await post(rig, "/v1/completions", **body)).text)
        return "".join(event["choices"][0]["text"] for event in events)

    texts = await asyncio.gather(*(one(seed) for seed in range(60)))
    assert texts == [text_of(seed, [seed, 7], 20) for seed in range(60)]
    await rig.until_free()


async def test_of_several_prompts_a_refused_one_ends_the_others(rig: Rig) -> None:
    rig.simulation.gate.clear()
    reply = await post(rig, "/v1/completions", prompt=[[1, 2], [3] * 100], max_tokens=4)
    assert reply.status_code == 400
    rig.simulation.gate.set()
    await rig.until_free()


async def test_a_stop_string_ends_the_text_and_is_named(rig: Rig) -> None:
    whole = text_of(4, [5, 6], 30)
    stop = next(word for at in range(3, 20) if (word := whole[at : at + 2]).isascii())
    body = {"prompt": [5, 6], "max_tokens": 30, "seed": 4}
    for wanted in (stop, [stop, "never in there"]):
        (choice,) = (await post(rig, "/v1/completions", **body, stop=wanted)).json()["choices"]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_a_chat_is_rendered_with_one_bos(rig: Rig) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "x"}],
        },
    ]
    text = "system: be brief\nuser: the\nx\nassistant:"
    ids = [1, *TOKENIZER.encode(text, add_special_tokens=False)]
    found = (await post(rig, "/tokenize", messages=messages)).json()
    assert found == {"count": len(ids), "max_model_len": 64, "tokens": ids}
    body = {"messages": messages, "max_completion_tokens": 5, "seed": 9}
    reply = (await post(rig, "/v1/chat/completions", **body)).json()
    assert reply["object"] == "chat.completion"
    assert reply["usage"]["prompt_tokens"] == len(ids)
    message = reply["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", text_of(9, ids, 5))
    stream = (await post(rig, "/v1/chat/completions", **body, stream=True)).text
    choices = [event["choices"][0] for event in events_of(stream)]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in choices) == message["content"]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["waiting", "running"])
async def test_a_client_that_goes_away_frees_both_caches(moment: str, stream: bool) -> None:
    async with serve(Sizes(**{**SIZES.__dict__, "max_num_seqs": 1})) as rig:
        rig.simulation.gate.clear()
        scheduler = rig.engine.scheduler
        body = {"prompt": [[1, 2]] * (2 if moment == "waiting" else 1), "stream": stream}
        task = asyncio.create_task(post(rig, "/v1/completions", **body))
        await rig.until(
            lambda: scheduler.running and len(scheduler.waiting) == len(body["prompt"]) - 1
        )
        task.cancel()
        # Nothing is generated meanwhile, so nothing is written that could fail.
        await rig.until(lambda: not scheduler.has_work)
        rig.simulation.gate.set()
        await rig.until_free()
        assert rig.engine.latencies.finished["abort"] == len(body["prompt"])
        assert (await post(rig, "/v1/completions", prompt=[1], max_tokens=2)).status_code == 200


async def test_beyond_the_queues_limit_a_request_gets_429() -> None:
    async with serve(max_num_queued_reqs=1) as rig:
        rig.simulation.gate.clear()
        prompts = [[seed] for seed in range(12)]
        replies = [
            asyncio.create_task(post(rig, "/v1/completions", prompt=prompt, max_tokens=2))
            for prompt in prompts
        ]
        await rig.until(lambda: any(reply.done() for reply in replies))
        rig.simulation.gate.set()
        found = await asyncio.gather(*replies)
        codes = [reply.status_code for reply in found]
        assert set(codes) == {200, 429}
        error = found[codes.index(429)].json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "max_num_queued_reqs" in error["message"]
        await rig.until_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_in_mid_stream_says_so(rig: Rig, stream: bool) -> None:
    rig.simulation.gate.clear()
    task = asyncio.create_task(
        post(rig, "/v1/completions", prompt=[1], max_tokens=8, stream=stream)
    )
    await rig.until(lambda: rig.engine._requests)
    error: NeoError = GpuWorkerDiedError("gone for good")
    rig.engine._fail_all(error)
    reply = await task
    if stream:
        assert reply.status_code == 200
        (event,) = events_of(reply.text)
    else:
        assert reply.status_code == 503
        event = reply.json()
    assert event["error"]["message"] == "gone for good"
    assert event["error"]["code"] == "service_unavailable"


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_has_n_choices_of_their_own_seeds(rig: Rig, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": [[5, 6], [7, 8]], "max_tokens": 4, "n": 2, "seed": 3}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = await post(rig, "/v1/completions", **body)
    texts = [""] * 4
    if stream:
        *chunks, last = events_of(reply.text)
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        usage = last["usage"]
    else:
        choices, usage = reply.json()["choices"], reply.json()["usage"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in choices]
    expected = [text_of(seed, prompt, 4) for prompt in body["prompt"] for seed in (3, 4)]
    assert texts == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 16)
    await rig.until_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_the_prompt_before_the_output(rig: Rig, stream: bool) -> None:
    ids = TOKENIZER.encode("the fox")
    reply = await post(
        rig, "/v1/completions", prompt="the fox", max_tokens=4, seed=3, echo=True, stream=stream
    )
    if stream:
        text = "".join(event["choices"][0]["text"] for event in events_of(reply.text))
    else:
        text = reply.json()["choices"][0]["text"]
        assert reply.json()["usage"]["completion_tokens"] == 4
    assert text == "the fox" + text_of(3, ids, 4)


async def test_a_prompt_is_cut_from_its_beginning_but_keeps_what_begins_every_text(
    rig: Rig,
) -> None:
    ids = TOKENIZER.encode("the quick brown fox")
    for prompt, kept in (("the quick brown fox", [ids[0], *ids[-2:]]), (ids, ids[-3:])):
        reply = await post(
            rig, "/v1/completions", prompt=prompt, max_tokens=4, seed=3, truncate_prompt_tokens=3
        )
        assert reply.json()["choices"][0]["text"] == text_of(3, kept, 4)
        assert reply.json()["usage"]["prompt_tokens"] == 3


async def test_of_n_that_do_not_fit_into_the_queue_none_is_left() -> None:
    async with serve(Sizes(max_num_seqs=1), max_num_queued_reqs=2) as rig:
        rig.simulation.gate.clear()
        scheduler, held = rig.engine.scheduler, []
        for queue in (scheduler.running, scheduler.waiting):
            request = post(rig, "/v1/completions", prompt=[1], max_tokens=2)
            held.append(asyncio.create_task(request))
            await rig.until(lambda queue=queue: len(queue) == 1)
        reply = await post(rig, "/v1/completions", prompt=[1], max_tokens=2, n=2)
        assert reply.status_code == 429
        assert "n is 2" in reply.json()["error"]["message"]
        assert len(rig.engine.scheduler.waiting) == 1
        rig.simulation.gate.set()
        assert {reply.status_code for reply in await asyncio.gather(*held)} == {200}
