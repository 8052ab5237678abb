"""Riders through the real processes: greedy tokens equal transformers' in fp32 whatever happens."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protos import inference_pb2 as pb
from tests.e2e.prompts import PROMPTS
from tests.helpers.reference import Reference
from tests.helpers.server import RunningServer, request_of, running_server

NEW_TOKENS = 6  # each takes as many plans as the model has layers, and one
FLAGS = ("--max-model-len", "256", "--num-gpu-blocks-override", "64", "--kv-offloading-size", "0.2")
SHORT = [prompt for prompt in PROMPTS if len(prompt) < 100][:12]
RIDE_CHURN = "tests.helpers.policies:ride_churn"
BESIDE_GPU = "neo_server.policies.piggyback:beside_gpu"


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


def _stream(server: RunningServer, number: int, delay_s: float, aborted: bool) -> list[int]:
    """Joins after a while; an aborted one leaves after its second token."""
    time.sleep(delay_s)
    request = request_of(SHORT[number], NEW_TOKENS, f"rider-{number}")
    tokens: list[int] = []
    for message in server.stub.Generate(request, timeout=240.0):
        if message.HasField("delta"):
            tokens.extend(message.delta.token_ids)
            if aborted and len(tokens) >= 2:
                server.stub.Abort(pb.AbortRequest(request_id=request.request_id), timeout=10.0)
                aborted = False
    return tokens


def check_tokens_of_riders(
    policy: str,
    model: Path,
    reference: Reference,
    folder: Path,
    arguments: tuple[str, ...] = (),
    device: str = "cpu",
) -> None:
    """They join, leave and move, and every token is the one that transformers chooses."""
    chance = random.Random(policy)
    delays = [chance.uniform(0.0, 3.0) for _ in SHORT]
    aborts = [number % 4 == 3 for number in range(len(SHORT))]
    flags = ("--scheduling-policy", policy, "--dtype", "float32", *FLAGS, *arguments)
    with running_server(model, folder, *flags, device=device) as server:
        with ThreadPoolExecutor(len(SHORT)) as pool:
            results = list(
                pool.map(_stream, [server] * len(SHORT), range(len(SHORT)), delays, aborts)
            )
        loads = server.loads()
        server.assert_caches_end_empty()
    # A prefill gives the first token; while some move about, batches give a part of the others.
    tokens_by_riding = 1 if policy == RIDE_CHURN else NEW_TOKENS - 1
    assert loads.iterations["piggyback"] > tokens_by_riding * 30
    assert loads.num_cpu_decodes > 0
    if policy == RIDE_CHURN:
        assert loads.num_swap_ins > 0
    for prompt, tokens, aborted in zip(SHORT, results, aborts, strict=True):
        assert len(tokens) == NEW_TOKENS or (aborted and len(tokens) >= 2)
        prompt_ids = reference.encode(prompt)
        assert reference.first_difference(prompt_ids, tokens) is None, prompt


@pytest.mark.parametrize("policy", ["piggyback", BESIDE_GPU, RIDE_CHURN])
def test_tokens_of_riders_that_join_leave_and_move_equal_transformers(
    policy: str, demo_model: Path, reference: Reference, tmp_path: Path
) -> None:
    check_tokens_of_riders(policy, demo_model, reference, tmp_path)


def test_a_wave_outlives_its_cpu_workers(
    demo_model: Path, reference: Reference, tmp_path: Path
) -> None:
    """All of them die in mid-wave; the server starts others, and riders go on."""
    flags = ("--scheduling-policy", "piggyback", "--dtype", "float32", *FLAGS)
    with running_server(demo_model, tmp_path, *flags) as server:
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_stream, server, i, 0.0, False) for i in range(4)]
            server.wait_until("loads.iterations['piggyback'] > 10", 120.0)
            before = server.cpu_worker_pids()
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            results = [stream.result() for stream in streams]
        assert set(server.cpu_worker_pids()).isdisjoint(before)
        server.assert_caches_end_empty()
    for prompt, tokens in zip(SHORT, results, strict=False):
        assert len(tokens) == NEW_TOKENS
        assert reference.first_difference(reference.encode(prompt), tokens) is None, prompt
