"""Each sampling and response parameter against a running server, with transformers as the judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from protos import inference_pb2 as pb
from tests.helpers.reference import Reference
from tests.helpers.server import Generation, RunningServer, request_of, running_server

PROMPT = "The capital of France is"
TOLERANCE = 1e-3
TOKENS = 16
Adjust = Callable[[torch.Tensor, list[int]], torch.Tensor]  # logits, output so far


@pytest.fixture(scope="module", params=["gpu-only", "mixed"])
def server(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """`mixed` puts every second request into the CPU-cache; a small budget cuts prompts."""
    flags = ["--scheduling-policy", str(request.param), "--max-model-len", "512"]
    flags += ["--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--no-profile"]
    with running_server(demo_model, tmp_path_factory.mktemp("sampling"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


@torch.inference_mode()
def logprobs_after(reference: Reference, ids: list[int]) -> torch.Tensor:
    """Row i: log-softmax of what follows ids[: i + 1]. fp64."""
    return reference.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def check(
    entry: pb.TokenLogprobs,
    row: torch.Tensor,
    token: int,
    n_top: int,
    tolerance: float,
    rank_slack: float,
) -> None:
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(float(row[token]), abs=tolerance)
    rank = int((row > row[token]).sum()) + 1
    assert abs(entry.rank - rank) <= rank_slack * max(rank, 100)
    assert len(entry.top) == n_top
    for place, top in enumerate(entry.top):
        assert top.logprob == pytest.approx(float(row[top.token_id]), abs=tolerance)
        assert top.logprob == pytest.approx(float(row.topk(n_top).values[place]), abs=tolerance)


def check_logprobs(
    server: RunningServer,
    reference: Reference,
    temperature: float,
    tolerance: float = TOLERANCE,
    rank_slack: float = 0.0,
) -> None:
    """``rank_slack``: share of a rank of 100 or more by which it may be off."""
    prompt = reference.encode(PROMPT * 12)  # longer than the budget: it comes in chunks
    requests = []
    for n_top, n_prompt in ((5, 3), (0, 0)):
        request = request_of(prompt, TOKENS, temperature=temperature, seed=3)
        request.response_options.logprobs = n_top
        request.response_options.prompt_logprobs = n_prompt
        requests.append(request)
    for request, result in zip(requests, server.generate_all(requests), strict=True):
        options = request.response_options
        rows = logprobs_after(reference, prompt + result.token_ids)
        first, *others = result.prompt_logprobs
        assert (first.token_id, first.HasField("logprob")) == (prompt[0], False)
        assert len(others) == len(prompt) - 1
        for position, entry in enumerate(others, 1):
            row, token = rows[position - 1], prompt[position]
            check(entry, row, token, options.prompt_logprobs, tolerance, rank_slack)
        assert len(result.logprobs) == len(result.token_ids) == TOKENS
        for i, entry in enumerate(result.logprobs):
            row, token = rows[len(prompt) + i - 1], result.token_ids[i]
            check(entry, row, token, options.logprobs, tolerance, rank_slack)
    server.assert_caches_end_empty()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_log_softmax_of_transformers(
    server: RunningServer, reference: Reference, temperature: float
) -> None:
    check_logprobs(server, reference, temperature)


def is_greedy(
    reference: Reference, prompt: list[int], output: list[int], adjust: Adjust | None = None
) -> bool:
    """Each token is what transformers would choose there; ``adjust`` changes the logits before."""
    ids = torch.tensor([prompt + output])
    with torch.inference_mode():
        logits = reference.model(ids, logits_to_keep=len(output) + 1).logits[0, :-1].double()
        rows = [adjust(row, output[:i]) if adjust else row for i, row in enumerate(logits)]
    return [int(row.argmax()) for row in rows] == output


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.3},
        {"presence_penalty": -0.5, "frequency_penalty": 0.9, "repetition_penalty": 1.1},
    ],
    ids=["presence", "frequency", "repetition", "all"],
)
def test_penalties_are_those_of_vllms_documentation(
    server: RunningServer, reference: Reference, penalties: dict[str, float]
) -> None:
    prompt = reference.encode("My favourite colours are")

    def adjust(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        seen = torch.tensor(sorted({*prompt, *output}))
        factor = penalties.get("repetition_penalty", 1.0)
        there = logits[seen]
        logits[seen] = torch.where(there > 0, there / factor, there * factor)
        for token in set(output):
            logits[token] -= penalties.get("frequency_penalty", 0.0) * output.count(token)
            logits[token] -= penalties.get("presence_penalty", 0.0)
        return logits

    requests = [request_of(prompt, TOKENS, **penalties), request_of(prompt, TOKENS)]
    result, plain = server.generate_all(requests)
    assert is_greedy(reference, prompt, result.token_ids, adjust)
    assert result.token_ids != plain.token_ids
    assert is_greedy(reference, prompt, plain.token_ids)


def test_logit_bias_is_added_and_a_large_one_decides(
    server: RunningServer, reference: Reference
) -> None:
    prompt = reference.encode(PROMPT)
    paris = server.generate(request_of(prompt, 1)).token_ids[0]
    request = request_of(prompt, 8)
    request.sampling_params.logit_bias[paris] = -100.0
    without = server.generate(request).token_ids
    assert without[0] != paris
    assert paris not in without
    request.sampling_params.logit_bias[paris] = 100.0
    assert server.generate(request).token_ids == [paris] * 8
    request.sampling_params.logit_bias[paris] = 0.5

    def adjust(logits: torch.Tensor, _output: list[int]) -> torch.Tensor:
        logits[paris] += 0.5
        return logits

    assert is_greedy(reference, prompt, server.generate(request).token_ids, adjust)


def test_min_tokens_holds_back_every_stop_token(server: RunningServer) -> None:
    free = server.generate(request_of(PROMPT, 12))
    request = request_of(PROMPT, 12, ignore_eos=False)
    request.stop_conditions.stop_token_ids.append(free.token_ids[0])
    assert server.generate(request).finish.stop_token_id == free.token_ids[0]
    request.stop_conditions.min_tokens = 6
    held = server.generate(request)
    assert len(held.token_ids) >= 6
    assert free.token_ids[0] not in held.token_ids[:6]


def by_index(responses: list[pb.GenerateResponse], n: int) -> list[Generation]:
    found = [Generation() for _ in range(n)]
    for response in responses[1:]:
        one = found[response.index]
        assert not one.finish.reason, "output behind the end"
        one.text += response.delta.text
        one.token_ids.extend(response.delta.token_ids)
        if response.HasField("finish_info"):
            one.finish = response.finish_info
    return found


def test_n_completions_interleave_and_equal_single_ones_of_their_seeds(
    server: RunningServer,
) -> None:
    request = request_of(PROMPT, TOKENS, temperature=1.0, seed=11)
    request.sampling_params.n = 3
    responses = list(server.stub.Generate(request, timeout=120.0))
    assert responses[0].HasField("prompt_info")
    order = [response.index for response in responses[1:]]
    assert order != sorted(order)  # as they are made, not one after the other
    found = by_index(responses, 3)
    singles = [request_of(PROMPT, TOKENS, temperature=1.0, seed=11 + i) for i in range(3)]
    for one, single in zip(found, server.generate_all(singles), strict=True):
        assert (one.token_ids, one.text) == (single.token_ids, single.text)
        assert one.finish.num_output_tokens == TOKENS
    assert len({tuple(one.token_ids) for one in found}) == 3
    server.assert_caches_end_empty()


def test_one_of_n_completions_can_be_aborted(server: RunningServer) -> None:
    request = request_of(PROMPT, 300, request_id="three", temperature=1.0, seed=1)
    request.sampling_params.n = 3
    stream = server.stub.Generate(request, timeout=120.0)
    responses = [next(stream) for _ in range(6)]
    server.stub.Abort(pb.AbortRequest(request_id="three", index=1))
    while not responses[-1].HasField("finish_info"):
        responses.append(next(stream))
    assert (responses[-1].index, responses[-1].finish_info.reason) == (1, pb.FINISH_REASON_ABORT)
    server.wait_until("loads.num_running_reqs == 2")
    assert all(next(stream).index != 1 for _ in range(4))
    server.stub.Abort(pb.AbortRequest(request_id="three"))
    rest = [r for r in stream if r.HasField("finish_info")]
    assert sorted(r.index for r in rest) == [0, 2]
    server.assert_caches_end_empty()


def test_a_seed_reproduces_and_a_tiny_temperature_is_greedy(server: RunningServer) -> None:
    seeded = request_of(PROMPT, TOKENS, temperature=0.9, seed=5, top_p=0.95, top_k=40, min_p=0.01)
    tiny = request_of(PROMPT, TOKENS, temperature=1e-4, seed=6)
    results = server.generate_all([seeded, seeded, tiny, request_of(PROMPT, TOKENS)])
    assert results[0].token_ids == results[1].token_ids
    assert results[2].token_ids == results[3].token_ids
    assert results[0].token_ids != results[3].token_ids


def test_echo_begins_with_the_prompt_and_special_tokens_can_be_shown(
    server: RunningServer, reference: Reference
) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    request = request_of(text, 4)
    plain = server.generate(request)
    request.response_options.echo = True
    echoed = server.generate(request)
    assert echoed.text == "user\nHi\n" + plain.text
    assert echoed.token_ids == reference.encode(text) + plain.token_ids
    assert echoed.finish.num_output_tokens == 4
    request.response_options.skip_special_tokens = False
    assert server.generate(request).text.startswith(text)


def test_a_prompt_is_truncated_to_its_end(server: RunningServer, reference: Reference) -> None:
    ids = reference.encode("one two three four five six seven eight nine ten")
    request = request_of("one two three four five six seven eight nine ten", 6)
    request.truncate_prompt_tokens = 4
    result, expected = server.generate(request), server.generate(request_of(ids[-4:], 6))
    assert (result.num_prompt_tokens, result.token_ids) == (4, expected.token_ids)
    long = request_of([5] * 2000, 12)
    long.truncate_prompt_tokens = -1
    result = server.generate(long)
    assert result.num_prompt_tokens == 500
    assert len(result.token_ids) == 12


def test_what_does_not_fit_is_refused_and_harms_nobody(server: RunningServer) -> None:
    wrong = [
        request_of(PROMPT, 4, **{name: value})
        for name, value in (
            ("presence_penalty", math.nan),
            ("frequency_penalty", 3.0),
            ("repetition_penalty", -1.0),
            ("n", 2),
        )
    ]
    wrong[-1].sampling_params.temperature = 0.0
    for field in ("logprobs", "prompt_logprobs"):
        wrong.append(request_of(PROMPT, 4))
        setattr(wrong[-1].response_options, field, 21)
    for request in wrong:
        with pytest.raises(grpc.RpcError) as caught:
            list(server.stub.Generate(request, timeout=30.0))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(server.generate(request_of(PROMPT, 3)).token_ids) == 3
