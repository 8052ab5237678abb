"""Biases, penalties and log-probabilities of whole plans, against transformers and plain loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker import features
from gpu_worker.executor import Outcome
from gpu_worker.plan_check import UNKNOWN_TOKEN
from neo_native import Feature, RowKind
from tests.helpers.engine_rig import MAX_LEN, MAX_SLOTS, Rig, Row
from tests.helpers.fake_cpu_side import FakeCpuSide
from tests.helpers.tiny_llama import make_checkpoint

PROMPT = 24
TOLERANCE = 1e-4
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    model = make_checkpoint(folder)
    tokens = torch.randint(3, 320, (MAX_SLOTS, MAX_LEN), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(tokens).logits
    return folder, tokens.tolist(), logits


@pytest.fixture
def rig(checkpoint: Any) -> Iterator[Rig]:
    made = Rig(checkpoint[0], cpu_side=FakeCpuSide())
    yield made
    made.close()


def want(rig: Rig, slot: int, wanted: Feature, **fields: float) -> None:
    params = rig.sequences.params
    params["features"][slot], params["n_prompt"][slot] = wanted, PROMPT
    for name, value in fields.items():
        params[name][slot] = value


def bias(rig: Rig, slot: int, stops: Sequence[int], biases: dict[int, float]) -> None:
    entries = [(token, -np.inf) for token in stops] + list(biases.items())
    rig.sequences.bias[slot, : len(entries)] = entries
    rig.sequences.params["n_stop"][slot] = len(stops)
    rig.sequences.params["n_biases"][slot] = len(biases)


def entries_of(outcome: Outcome) -> dict[tuple[int, int], tuple[int, float, int, list[Any]]]:
    """By row and position: token, logprob, rank and the likeliest."""
    found = {}
    for report in outcome.reports:
        for i, (row, position, n) in enumerate(
            zip(report.rows, report.positions, report.n_top, strict=True)
        ):
            token, rank, *top = report.ints[i].tolist()
            own, *logprobs = report.floats[i].tolist()
            likeliest = list(zip(top, logprobs, strict=True))[:n]
            found[int(row), int(position)] = (token, own, rank, likeliest)
    return found


def check_entry(entry: Any, logits: torch.Tensor, token: int, n_top: int) -> None:
    logprobs = logits.double().log_softmax(-1)
    assert entry[0] == token
    assert entry[1] == pytest.approx(float(logprobs[token]), abs=TOLERANCE)
    assert entry[2] == int((logits > logits[token]).sum()) + 1
    best = logprobs.topk(n_top)
    assert [token for token, _ in entry[3]] == best.indices.tolist()
    assert [own for _, own in entry[3]] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def penalised(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """vLLM's documentation, one token at a time."""
    out = logits.clone()
    prompt, output = tokens[:PROMPT], tokens[PROMPT:]
    for token in {*prompt, *output}:
        factor = PENALTIES["repetition_penalty"]
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= PENALTIES["frequency_penalty"] * output.count(token)
        out[token] -= PENALTIES["presence_penalty"]
    return out


@pytest.mark.parametrize("part", [1 << 24, 7 * 320])
@pytest.mark.parametrize("kind", [RowKind.PREFILL_GPU, RowKind.PREFILL_CPU])
def test_prompt_logprobs_of_chunks_are_those_of_the_whole(
    rig: Rig, checkpoint: Any, kind: RowKind, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "PART", part)
    tokens, logits = checkpoint[1], checkpoint[2]
    want(rig, 0, Feature.PROMPT_LOGPROBS, n_prompt_logprobs=3)
    want(rig, 1, Feature.PROMPT_LOGPROBS, n_prompt_logprobs=0)
    found: dict[int, dict[int, Any]] = {0: {}, 1: {}}
    # The second slot's row also holds output tokens, as after a preemption.
    for start, end, whole in ((0, 1, PROMPT + 4), (1, 15, 0), (15, PROMPT, 0)):
        batches = [[Row(0, kind, start, tokens[0][start:end], end == PROMPT)]]
        if whole:
            batches.append([Row(1, kind, 0, tokens[1][:whole])])
        for (row, position), entry in entries_of(rig.run(*batches)).items():
            found[row][position] = entry
    for slot, n_top in ((0, 3), (1, 0)):
        assert sorted(found[slot]) == list(range(1, PROMPT))
        for position, entry in found[slot].items():
            check_entry(entry, logits[slot, position - 1], tokens[slot][position], n_top)


def test_logprobs_of_sampled_tokens_are_the_models_own(rig: Rig, checkpoint: Any) -> None:
    tokens, logits = checkpoint[1], checkpoint[2]
    rig.sequences.params["temperature"][:3] = 1.5
    want(rig, 0, Feature.LOGPROBS, n_logprobs=5)
    want(rig, 1, Feature.LOGPROBS | Feature.BIASES, n_logprobs=1)
    bias(rig, 1, [], {7: 50.0})
    outcome = rig.run(
        *([Row(slot, RowKind.PREFILL_GPU, 0, tokens[slot][:PROMPT])] for slot in (2, 0))
    )
    found = entries_of(outcome)
    assert set(found) == {(1, PROMPT)}
    check_entry(found[1, PROMPT], logits[0, PROMPT - 1], int(outcome.tokens[1]), 5)
    outcome = rig.run([Row(1, RowKind.PREFILL_GPU, 0, tokens[1][:PROMPT])])
    assert outcome.tokens[0] == 7  # what the bias made of it; its logprob is without
    check_entry(entries_of(outcome)[0, PROMPT], logits[1, PROMPT - 1], 7, 1)
    assert outcome.logprobs[0] == pytest.approx(
        float(logits[1, PROMPT - 1].log_softmax(-1)[7]), abs=TOLERANCE
    )


def test_stop_tokens_are_held_back_until_the_sequence_is_long_enough(
    rig: Rig, checkpoint: Any
) -> None:
    tokens, logits = checkpoint[1], checkpoint[2]
    order = logits[0, PROMPT - 1].argsort(descending=True).tolist()
    for min_len, expected in ((PROMPT + 1, order[2]), (PROMPT, order[0])):
        want(rig, 0, Feature.BIASES, min_len=min_len)
        bias(rig, 0, order[:2], {})
        outcome = rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:PROMPT])])
        assert outcome.tokens[0] == expected


@pytest.mark.parametrize("part", [1 << 24, 1])
def test_penalties_count_prompt_and_output(
    rig: Rig, checkpoint: Any, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decodes of known and of unknown tokens, and decodes done twice."""
    monkeypatch.setattr(features, "PART", part)
    monkeypatch.setattr(features, "LEAST_WIDTH", 4)
    tokens = checkpoint[1]
    for slot in (0, 2):
        want(rig, slot, Feature.PENALTIES, **PENALTIES)
    own = {slot: list(tokens[slot][:PROMPT]) for slot in (0, 1, 2)}
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, own[0][:10], sample=False)])
    rows = [Row(0, RowKind.PREFILL_GPU, 10, own[0][10:])]
    rows += [Row(slot, RowKind.PREFILL_GPU, 0, own[slot]) for slot in (1, 2)]
    outcome = rig.run(rows[:2], rows[2:])
    slots, changed = [0, 1, 2], 0
    for i in range(12):
        for row, slot in enumerate(slots):
            logits = rig.logits[0][row]
            wanted = logits if slot == 1 else penalised(logits, own[slot])
            assert outcome.tokens[row] == int(wanted.argmax())
            changed += int(wanted.argmax() != logits.argmax())
            own[slot].append(int(outcome.tokens[row]))
        unknown = i % 3 == 0
        decodes = [
            Row(s, RowKind.DECODE_GPU, len(own[s]) - 1, [UNKNOWN_TOKEN if unknown else own[s][-1]])
            for s in slots
        ]
        outcome = rig.run(decodes[:1], decodes[1:])
        if not unknown:
            again = rig.run(decodes[:1], decodes[1:])
            assert again.tokens.tolist() == outcome.tokens.tolist()
    assert changed > 3


def test_the_next_sequence_of_a_slot_has_no_memory_of_the_last(rig: Rig, checkpoint: Any) -> None:
    tokens = checkpoint[1]
    want(rig, 0, Feature.PENALTIES, **PENALTIES)
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][: PROMPT + 8])])
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[3][:PROMPT])])
    outcome = rig.run([Row(0, RowKind.DECODE_GPU, PROMPT, [5])])
    expected = penalised(rig.logits[0][0], [*tokens[3][:PROMPT], 5])
    assert outcome.tokens[0] == int(expected.argmax())


def test_riders_have_penalties_and_logprobs_like_everybody(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their token is counted as they start, though no plan knows it."""
    monkeypatch.setitem(PENALTIES, "repetition_penalty", 4.0)
    layers, tokens = 3, checkpoint[1]
    rig = Rig(checkpoint[0], cpu_side=FakeCpuSide(), ride_groups=layers + 1, ride_capacity=2)
    own = {slot: list(tokens[slot][:PROMPT]) for slot in (0, 1)}
    want(rig, 0, Feature.PENALTIES | Feature.LOGPROBS, n_logprobs=2, **PENALTIES)
    outcome = rig.run([Row(slot, RowKind.PREFILL_CPU, 0, own[slot]) for slot in (0, 1)])
    changed = 0
    for _ in range(24):
        for slot in (0, 1):
            own[slot].append(int(outcome.tokens[slot]))
        for stage in range(layers + 1):
            outcome = rig.run(
                riders=[
                    Row(slot, RowKind.RIDE_CPU, len(own[slot]) - 1, [UNKNOWN_TOKEN],
                        stage == layers, stage, slot)
                    for slot in (0, 1)
                ]
            )  # fmt: skip
        logits = rig.logits[0]
        wanted = [penalised(logits[0], own[0]), logits[1]]
        assert outcome.tokens.tolist() == [int(row.argmax()) for row in wanted]
        changed += int(wanted[0].argmax() != logits[0].argmax())
        found = entries_of(outcome)
        assert set(found) == {(0, len(own[0]))}
        check_entry(found[0, len(own[0])], logits[0], int(outcome.tokens[0]), 2)
    assert changed > 0
    rig.close()
