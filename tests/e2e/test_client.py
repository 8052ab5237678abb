"""``Client`` and ``AsyncClient`` against a server with the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from neo_server import AsyncClient, Client, SamplingParams
from neo_server.errors import (
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.helpers.server import RunningServer, running_server

KEY = "sesame"
PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TURN = ({"role": "user", "content": "Say hello."},)


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "256", "--no-profile")
    cache = ("--kv-offloading-size", "0.1", "--api-key", KEY)
    folder = tmp_path_factory.mktemp("client")
    with running_server(demo_model, folder, *flags, *cache) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address, api_key=KEY) as client:
        yield client


def wait_until_idle(client: Client) -> None:
    while client.loads().num_running_reqs:
        pass


def test_deltas_joined_are_the_whole_answer(client: Client) -> None:
    whole = client.generate(PROMPT, GREEDY, request_id="whole")
    assert whole.request_id == "whole"
    assert "Paris" in whole.text
    ids = client.tokenize(PROMPT)
    assert whole.num_prompt_tokens == len(ids)
    deltas = list(client.stream(ids, GREEDY))
    assert (
        "".join(delta.text for delta in deltas) == whole.text == client.detokenize(whole.token_ids)
    )
    assert deltas[-1].finished is not None
    assert deltas[-1].finished.num_output_tokens == 12


def test_a_conversation_is_answered_in_the_models_template(client: Client) -> None:
    answer = client.generate(TURN, GREEDY)
    assert answer.num_prompt_tokens > client.generate("Say hello.", GREEDY).num_prompt_tokens
    assert client.model_info().has_chat_template
    assert {worker.kind for worker in client.server_info().workers} == {1, 2}


def test_several_completions_come_as_they_are_made(client: Client) -> None:
    params = SamplingParams(n=2, seed=7, max_tokens=6, ignore_eos=True, logprobs=0)
    whole = client.generate(PROMPT, params)
    texts, logprobs = ["", ""], [0, 0]
    for delta in client.stream(PROMPT, params):
        texts[delta.index] += delta.text
        logprobs[delta.index] += len(delta.logprobs)
    assert [output.text for output in whole.outputs] == texts
    assert texts[0] != texts[1]
    assert logprobs == [6, 6]


def test_closing_a_stream_ends_the_request(client: Client) -> None:
    stream = client.stream(PROMPT, LONG, request_id="mine")
    next(stream)
    with pytest.raises(DuplicateRequestError, match="mine"):
        client.generate(PROMPT, GREEDY, request_id="mine")
    stream.close()
    wait_until_idle(client)
    client.abort("nobody")


def test_errors_have_their_class(server: RunningServer, client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        client.generate(PROMPT, SamplingParams(temperature=-1.0))
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        client.generate(PROMPT, SamplingParams(max_tokens=-1))
    with pytest.raises(InvalidRequestError, match="token id is 4294967295"):
        client.detokenize([2**32 - 1])
    with Client(server.address) as nobody, pytest.raises(UnauthenticatedError):
        nobody.loads()
    with Client("127.0.0.1:1", timeout_s=5.0) as lost, pytest.raises(UnavailableError):
        lost.generate(PROMPT)
    with (
        Client(server.address, api_key=KEY, timeout_s=0.5) as hasty,
        pytest.raises(DeadlineError),
    ):
        hasty.generate(PROMPT, LONG)
    wait_until_idle(client)


async def test_asyncio_has_the_same_methods(server: RunningServer) -> None:
    async with AsyncClient(server.address, api_key=KEY) as client:
        answers = await asyncio.gather(*(client.generate(PROMPT, GREEDY) for _ in range(3)))
        deltas = [delta async for delta in client.stream(PROMPT, GREEDY)]
        assert {answer.text for answer in answers} == {"".join(delta.text for delta in deltas)}
        assert await client.detokenize(await client.tokenize(PROMPT)) == PROMPT
        assert (await client.model_info()).has_chat_template
        assert (await client.server_info()).max_model_len == 512

        stream = client.stream(PROMPT, LONG, request_id="mine")
        await anext(stream)
        assert (await client.loads()).num_running_reqs == 1
        await client.abort("mine")
        *_, last = [delta async for delta in stream]
        assert last.finished is not None
        assert last.finished.reason == "abort"

        task = asyncio.create_task(client.generate(PROMPT, LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await client.loads()).num_running_reqs:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequestError, match="top_p is 2"):
            await client.generate(PROMPT, SamplingParams(top_p=2.0))
