from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker import sampler
from gpu_worker.sampler import SamplingParams, exponential_noise, sample

DRAWS = 40_000


def params(rows: int, **columns: Any) -> SamplingParams:
    """One value per column for all rows, or an array; positions count up unless given."""
    defaults = {
        "seeds": (7, np.uint64),
        "positions": (np.arange(rows), np.uint32),
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
    }
    return SamplingParams(
        **{
            name: np.full(rows, columns.get(name, value), dtype)
            for name, (value, dtype) in defaults.items()
        }
    )


def exact_distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Temperature, min-p, top-k, top-p, written the slow way in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            p[token] = 0.0
        mass += p[token]
    return p / p.sum()


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (2.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.3, 12, 0.8, 0.05),
]


@pytest.mark.parametrize("candidates", [1024, 4])
@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_follow_the_filtered_distribution(
    filters: tuple[float, int, float, float], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    temperature, top_k, top_p, min_p = filters
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = exact_distribution(logits.numpy(), temperature, top_k, top_p, min_p)
    columns = params(DRAWS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = sample(logits.expand(DRAWS, -1), columns)
    counts = np.bincount(tokens.numpy(), minlength=40)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi2 = float(((counts - DRAWS * expected)[kept] ** 2 / (DRAWS * expected[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_seeds_as_well_as_positions_give_independent_draws() -> None:
    logits = torch.zeros(DRAWS, 10)
    tokens, _ = sample(logits, params(DRAWS, seeds=np.arange(DRAWS), positions=5))
    pairs = np.bincount(tokens.numpy()[:-1] * 10 + tokens.numpy()[1:], minlength=100)
    chi2 = float(((pairs - DRAWS / 100) ** 2 / (DRAWS / 100)).sum())
    assert chi2 < 99 + 5 * np.sqrt(2 * 99)


def test_the_noise_is_exponential() -> None:
    noise = exponential_noise(params(200), torch.empty(200, 5000)).double()
    assert noise.min() > 0
    assert noise.mean().item() == pytest.approx(1.0, abs=0.005)
    assert noise.var().item() == pytest.approx(1.0, abs=0.02)
    assert (noise < 1e-4).double().mean().item() == pytest.approx(1e-4, rel=0.4)


def test_the_noise_is_the_hash_of_seed_position_and_token() -> None:
    """Written again in Python's integers: a change here changes every seeded answer."""
    mask = 2**64 - 1

    def key(seed: int, position: int) -> int:
        word = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & mask
        return word ^ word >> 31

    def mix(word: int) -> int:
        word = ((word ^ word >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        word = ((word ^ word >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return word ^ word >> 16

    seed, position = 2**63 + 12345, 777
    noise = exponential_noise(params(1, seeds=seed, positions=position), torch.empty(1, 500))
    for token in range(500):
        low, high = key(seed, position) & 0xFFFFFFFF, key(seed, position) >> 32
        word = mix(mix((token * 0x9E3779B9 & 0xFFFFFFFF) ^ low) ^ high) & 0x7FFFFFFF
        expected = -math.log1p(-(word + 0.5) / 2**31)
        assert noise[0, token].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("at_a_time", [1, 5, 1000])
def test_a_row_draws_the_same_in_any_batch(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands beside it, wherever it stands, and however many rows are taken at a time."""
    generator = torch.Generator().manual_seed(5)
    rows, vocab = 24, 3000
    logits = torch.randn(rows, vocab, generator=generator)
    draw = np.random.default_rng(5)
    columns = params(
        rows,
        seeds=draw.integers(0, 2**63, rows, dtype=np.uint64),
        positions=draw.integers(0, 9000, rows),
        temperature=draw.choice([0.0, 0.7, 1.5], rows),
        top_k=draw.choice([0, 3, 50, 2000], rows),
        top_p=draw.choice([1.0, 0.4, 0.999], rows),
        min_p=draw.choice([0.0, 0.1], rows),
    )
    together, logprobs = sample(logits, columns)
    monkeypatch.setattr(sampler, "PART_BYTES", at_a_time * vocab * logits.element_size())
    for _ in range(5):
        subset = draw.permutation(rows)[: draw.integers(1, rows)]
        tokens, part = sample(logits[subset], columns.take(subset))
        assert torch.equal(tokens, together[subset])
        assert torch.equal(part, logprobs[subset])


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation gave, in elements."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.size = max(self.size, out.numel())
        return out


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_nothing_that_sampling_allocates_grows_with_the_rows(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocab, at_a_time = 100, 500, 4
    monkeypatch.setattr(sampler, "PART_BYTES", at_a_time * vocab * 4)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    with Largest() as largest:
        sample(logits, params(rows, top_p=top_p))
    assert 0 < largest.size <= at_a_time * vocab


def test_another_position_or_seed_draws_other_noise() -> None:
    like = torch.empty(1, 1000)
    base = exponential_noise(params(1, seeds=1, positions=1), like)
    for seed, position in ((1, 2), (2, 1), (1 + 2**40, 1)):
        other = exponential_noise(params(1, seeds=seed, positions=position), like)
        assert torch.corrcoef(torch.cat((base, other)))[0, 1].abs() < 0.15


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    columns = params(6, temperature=np.array([0, 1, 0, 1, 0, 1]), top_k=np.array([0, 1] * 3))
    tokens, _ = sample(logits, columns)
    assert torch.equal(tokens, logits.argmax(-1))  # top_k = 1 is greedy as well


def test_the_logprob_is_the_models_own() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2)) * 3
    tokens, logprobs = sample(logits, params(8, temperature=0.3, top_k=4, top_p=0.9))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(4000, -1)
    tokens, _ = sample(logits, params(4000, top_k=2))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_a_tiny_top_p_keeps_the_likeliest() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(9))
    tokens, _ = sample(logits, params(50, top_p=1e-6, temperature=5.0))
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-6])
def test_the_smallest_temperature_is_greedy_and_overflows_nothing(temperature: float) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)) * 30
    tokens, _ = sample(logits, params(4, temperature=temperature))
    assert tokens.tolist() == logits.argmax(-1).tolist()
