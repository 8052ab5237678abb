from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.prompts import chat
from tests.helpers.server import request_of, running_server


@pytest.mark.parametrize("policy", ["gpu-only", "simple-offload"])
def test_deltas_join_to_the_decoded_whole_and_never_split_a_character(
    policy: str, demo_model: Path, tmp_path: Path
) -> None:
    # At a high temperature the model emits every kind of token, stray UTF-8 bytes among them.
    prompts = ["Emoji: 😀🎉🚀👩‍👩‍👧‍👦", "안녕하세요 " * 4, "今日は", chat("Count from 1 to 20.")]
    requests = [
        request_of(prompt, 96, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
        for temperature in (0.0, 1.5, 3.0)
    ]
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    with running_server(demo_model, tmp_path, "--scheduling-policy", policy) as server:
        results = server.generate_all(requests)
    multibyte = 0
    for result in results:
        whole = tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert result.text == whole
        multibyte += sum(ord(character) > 127 for character in whole)
    assert multibyte > 0


def test_a_seed_reproduces_wherever_the_attention_runs(demo_model: Path, tmp_path: Path) -> None:
    texts: list[list[int]] = []
    for policy in ("gpu-only", "simple-offload"):
        with running_server(demo_model, tmp_path, "--scheduling-policy", policy) as server:
            request = request_of("The weather today is", 32, temperature=0.8, seed=7, top_p=0.9)
            texts += [server.generate(request).token_ids for _ in range(2)]
    assert texts[0] == texts[1] == texts[2] == texts[3]
