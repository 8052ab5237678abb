from __future__ import annotations

import pytest

from neo_server.outputs import Collector, Delta, finished_of
from protos import inference_pb2 as pb


def test_deltas_joined_are_the_whole() -> None:
    collector = Collector()
    info = pb.FinishInfo(
        reason=pb.FINISH_REASON_STOP, stop_str="x", num_prompt_tokens=4, num_output_tokens=3
    )
    deltas = [
        collector.add(pb.GenerateResponse(request_id="r", **event))
        for event in (
            {"prompt_info": pb.PromptInfo(num_prompt_tokens=4)},
            {"delta": pb.Delta(text="one", token_ids=[1])},
            {"delta": pb.Delta(token_ids=[2, 3])},
            {"finish_info": info},
        )
    ]
    finished = finished_of(info)
    assert deltas == [None, Delta("one", (1,)), Delta("", (2, 3)), Delta(finished=finished)]
    whole = collector.whole()
    assert (whole.request_id, whole.text, whole.token_ids) == ("r", "one", (1, 2, 3))
    assert whole.num_prompt_tokens == 4
    assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("stop", "x")


@pytest.mark.parametrize(
    ("stop", "expected"), [({"stop_token_id": 0}, 0), ({"stop_str": "."}, "."), ({}, None)]
)
def test_the_stop_reason_is_the_token_or_the_string(
    stop: dict[str, object], expected: object
) -> None:
    assert finished_of(pb.FinishInfo(reason=1, **stop)).stop_reason == expected


@pytest.mark.parametrize(
    ("gpu", "cpu", "words"),
    [
        (3, 0, "GPU-request"),
        (0, 3, "CPU-request"),
        (0, 0, "GPU-request"),
        (2, 3, "GPU and CPU (2 + 3 steps)"),
    ],
)
def test_placement_in_words(gpu: int, cpu: int, words: str) -> None:
    info = pb.FinishInfo(reason=2, num_gpu_decodes=gpu, num_cpu_decodes=cpu)
    assert finished_of(info).placement == words
