"""``LLM`` and ``AsyncLLM`` with the demo model and real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from neo_server import LLM, AsyncLLM, SamplingParams
from neo_server.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    NeoError,
    ShuttingDownError,
    WorkerStartError,
)
from tests.helpers.processes import alive, family
from tests.helpers.server import REPO
from tests.helpers.tiny_llama import make_checkpoint

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TURN = ({"role": "user", "content": "Say hello."},)


def options_of(shm: Path) -> dict[str, Any]:
    return {
        **{"device": "cpu", "dtype": "float32", "profile": False, "max_model_len": 512},
        **{"num_gpu_blocks_override": 256, "kv_offloading_size": 0.1, "shm_dir": shm},
    }


def assert_nothing_left(shm: Path, children: set[int]) -> None:
    assert not alive(children)
    assert list(shm.iterdir()) == []


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def llm(demo_model: Path, shm: Path) -> Iterator[LLM]:
    before = family(os.getpid())
    with LLM(str(demo_model), scheduling_policy="mixed", **options_of(shm)) as llm:
        children = family(os.getpid()) - before
        assert len(children) == 3  # the gpu worker and two cpu-attention workers
        yield llm
    assert_nothing_left(shm, children)


def test_a_batch_comes_back_in_order(llm: LLM) -> None:
    ids = llm.tokenize(PROMPT)
    assert llm.detokenize(ids) == PROMPT
    prompts = [PROMPT, ids, "One, two, three,", PROMPT]
    before = llm.loads()
    outputs = llm.generate(prompts, GREEDY)
    assert outputs[0].text == outputs[1].text == outputs[3].text != outputs[2].text
    assert "Paris" in outputs[0].text
    for output in outputs:
        assert output.text == llm.detokenize(output.token_ids)
        assert len(output.token_ids) == output.outputs[0].finished.num_output_tokens == 12
        assert output.outputs[0].finish_reason == "length"
    assert outputs[0].num_prompt_tokens == len(ids)
    assert len({output.request_id for output in outputs}) == 4
    loads = llm.loads()
    # ``mixed`` computes every second request's attention on the cpu workers.
    assert loads.num_cpu_decodes > before.num_cpu_decodes
    assert loads.num_gpu_decodes > before.num_gpu_decodes
    assert any(output.outputs[0].finished.num_cpu_decodes for output in outputs)


def test_one_prompt_is_a_batch_of_one(llm: LLM) -> None:
    (one,) = llm.generate(PROMPT, GREEDY)
    (same,) = llm.generate(llm.tokenize(PROMPT), GREEDY)
    assert one.token_ids == same.token_ids
    assert llm.generate([]) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 3)]
    lengths = [len(output.token_ids) for output in llm.generate([PROMPT, PROMPT], each)]
    assert lengths == [1, 3]
    with pytest.raises(InvalidRequestError, match="params has 2 entries; there are 1 prompts"):
        llm.generate(PROMPT, each)


def test_several_completions_with_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=7, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    (output,) = llm.generate(PROMPT, params)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({one.token_ids for one in output.outputs}) > 1
    assert len(output.prompt_logprobs) == output.num_prompt_tokens
    for one in output.outputs:
        assert [entry.token_id for entry in one.logprobs] == list(one.token_ids)
        assert all(len(entry.top) == 2 for entry in one.logprobs)
    (again,) = llm.generate(PROMPT, params)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in output.outputs]
    assert llm.loads().num_running_reqs == 0


def test_a_conversation_is_answered_in_the_models_template(llm: LLM) -> None:
    (one,) = llm.chat(TURN, GREEDY)
    several = llm.chat([TURN, TURN], GREEDY)
    assert [output.token_ids for output in several] == [one.token_ids] * 2
    (plain,) = llm.generate("Say hello.", GREEDY)
    assert one.num_prompt_tokens > plain.num_prompt_tokens
    assert llm.model_info().has_chat_template
    with pytest.raises(InvalidRequestError, match="conversation 0 has no messages"):
        llm.chat("hello")


def test_a_refused_prompt_is_named_and_the_others_end(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*vocab_size") as caught:
        llm.generate([PROMPT, [10**6]], LONG)
    assert caught.value.param == "prompt"
    assert llm.loads().num_running_reqs + llm.loads().num_waiting_reqs == 0
    assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 12


def test_a_lost_gpu_worker_is_replaced_and_the_batch_ends(llm: LLM) -> None:
    (gpu,) = [worker.pid for worker in llm.server_info().workers if worker.kind == 1]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (expected,) = llm.generate(PROMPT, params)
    done = llm.loads().num_output_tokens
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(llm.generate, PROMPT, params)
        while llm.loads().num_output_tokens < done + 5:
            time.sleep(0.01)
        os.kill(gpu, signal.SIGKILL)
        (output,) = batch.result()
    llm.generate(PROMPT, SamplingParams(max_tokens=1))  # by the new worker
    assert [worker.pid for worker in llm.server_info().workers if worker.kind == 1] != [gpu]
    assert output.token_ids == expected.token_ids


async def test_streams_in_one_event_loop(demo_model: Path, tmp_path: Path) -> None:
    before = family(os.getpid())
    async with AsyncLLM(str(demo_model), **options_of(tmp_path)) as llm:
        children = family(os.getpid()) - before
        whole = await llm.generate(PROMPT, GREEDY)
        deltas = [delta async for delta in llm.stream(PROMPT, GREEDY)]
        assert "".join(delta.text for delta in deltas) == whole.text
        assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
        assert deltas[-1].finished is not None
        assert [delta.finished for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert len(deltas) > 2

        stream = llm.stream(PROMPT, LONG, request_id="mine")
        await anext(stream)
        with pytest.raises(DuplicateRequestError, match="mine"):
            await llm.generate(PROMPT, GREEDY, request_id="mine")
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await llm.loads()).num_running_reqs == 0

        aborted = asyncio.create_task(llm.generate(PROMPT, LONG, request_id="other"))
        await asyncio.sleep(0.2)
        await llm.abort("other")
        assert (await aborted).outputs[0].finish_reason == "abort"

        left = asyncio.create_task(llm.generate(PROMPT, LONG))
        await asyncio.sleep(0.2)
    with pytest.raises(ShuttingDownError, match="the engine is closed"):
        await left
    with pytest.raises(ShuttingDownError, match="the engine is closed"):
        await llm.generate(PROMPT)
    await llm.close()
    assert_nothing_left(tmp_path, children)


def test_a_worker_that_cannot_start_is_an_error_of_ours(tmp_path: Path) -> None:
    model, shm = tmp_path / "model", tmp_path / "shm"
    model.mkdir()
    shm.mkdir()
    make_checkpoint(model)
    (model / "model.safetensors").write_bytes(b"no weights")
    before = family(os.getpid())
    with pytest.raises(WorkerStartError):
        LLM(str(model), skip_tokenizer_init=True, **options_of(shm))
    assert_nothing_left(shm, family(os.getpid()) - before)


SCRIPT = """
import sys
from neo_server import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True,
          profile=False, kv_offloading_size=0.01, num_gpu_blocks_override=64, shm_dir=sys.argv[2])
params = SamplingParams(max_tokens=3, ignore_eos=True)
print(len(llm.generate([5, 6], params)[0].token_ids), flush=True)
if sys.argv[3] == "wait":
    llm.generate([[5, 6]] * 200, SamplingParams(max_tokens=400, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder)
    return folder


def run_script(model: Path, shm: Path, mode: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(model), str(shm), mode]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO
    )


def test_a_program_that_does_not_close_it_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    with run_script(tiny, tmp_path, "end") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "3\n"), err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_a_batch_and_the_workers(tiny: Path, tmp_path: Path) -> None:
    with run_script(tiny, tmp_path, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        children = family(process.pid) - {process.pid}
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    assert_nothing_left(tmp_path, children)


def test_a_closed_engine_says_so(tiny: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny), load_format="dummy", skip_tokenizer_init=True, **options_of(tmp_path))
    llm.close()
    llm.close()
    with pytest.raises(NeoError, match="closed"):
        llm.generate([1, 2])
    assert list(tmp_path.iterdir()) == []
