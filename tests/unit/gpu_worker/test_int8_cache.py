"""The executor over a CPU-cache whose elements are int8: close to exact, and repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.errors import GeometryError
from gpu_worker.geometry_check import check_geometry
from neo_native import RowKind, SwapKind, WireDType
from protos.config import CacheConfig, DType, EngineConfig, KvCacheDType, SchedulerConfig
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import BLOCK_SIZE, MAX_LEN, Rig, Row, make_geometry
from tests.helpers.tiny_llama import make_checkpoint

INT8 = WireDType.INT8
# Logits of this model spread over some +-10; int8 rows err by 1/254 of their largest element.
TOLERANCE = 0.35


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("int8")
    model = make_checkpoint(folder, "llama3")
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 320, (3, MAX_LEN), generator=generator)
    with torch.no_grad():
        return folder, tokens.tolist(), model(tokens).logits


def decode_all(folder: Path, tokens: list[list[int]], workers: int = 1) -> torch.Tensor:
    """Logits of the last 40 positions, [slot, 40, vocabulary], every one decoded on the CPU."""
    rig = Rig(folder, workers=workers, kv_dtype=INT8)
    try:
        for slot in range(3):
            rig.run([Row(slot, RowKind.PREFILL_CPU, 0, tokens[slot][: MAX_LEN - 40], False)])
        found = []
        for at in range(MAX_LEN - 40, MAX_LEN):
            rig.run([Row(s, RowKind.DECODE_CPU, at, tokens[s][at : at + 1]) for s in range(3)])
            found.append(rig.logits[0].clone())
        return torch.stack(found, 1)
    finally:
        rig.close()


def test_logits_are_finite_and_close_to_those_of_the_exact_cache(checkpoint: Any) -> None:
    folder, tokens, expected = checkpoint
    logits = decode_all(folder, tokens)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits, expected[:, -40:], atol=TOLERANCE, rtol=0)
    # And no closer than int8 can be: it is int8 that was measured.
    assert (logits - expected[:, -40:]).abs().max() > 1e-3


def test_two_runs_give_the_same_bits(checkpoint: Any) -> None:
    folder, tokens, _ = checkpoint
    assert torch.equal(decode_all(folder, tokens), decode_all(folder, tokens))


def test_a_sequence_swapped_out_and_in_again_goes_on_close_to_exact(checkpoint: Any) -> None:
    folder, tokens, expected = checkpoint
    rig = Rig(folder, workers=1, kv_dtype=INT8)
    rig.run([Row(0, RowKind.PREFILL_GPU, 0, tokens[0][:60])])
    steps: list[tuple[RowKind, int, list[tuple[int, SwapKind, int]]]] = [
        (RowKind.DECODE_CPU, 60, [(0, SwapKind.OUT, 60)]),
        (RowKind.DECODE_CPU, 61, []),
        (RowKind.DECODE_GPU, 62, [(0, SwapKind.IN, 62)]),
        (RowKind.DECODE_CPU, 63, [(0, SwapKind.OUT, 63)]),
    ]
    for kind, at, swaps in steps:
        rig.run([Row(0, kind, at, tokens[0][at : at + 1])], swaps=swaps)
        torch.testing.assert_close(rig.logits[0][0], expected[0, at], atol=TOLERANCE, rtol=0)
    rig.close()


def test_later_chunks_of_a_prefill_see_the_dequantised_cache(checkpoint: Any) -> None:
    folder, tokens, expected = checkpoint
    rig = Rig(folder, workers=1, kv_dtype=INT8)
    for start, end in ((0, 30), (30, 64), (64, 100)):
        rig.run([Row(0, RowKind.PREFILL_CPU, start, tokens[0][start:end])])
        torch.testing.assert_close(rig.logits[0][0], expected[0, end - 1], atol=TOLERANCE, rtol=0)
    rig.close()


@pytest.mark.parametrize("kind", KvCacheDType)
def test_segments_of_another_cache_dtype_are_refused(checkpoint: Any, kind: KvCacheDType) -> None:
    folder = checkpoint[0]
    model = ModelConfig.from_pretrained(folder)
    config = EngineConfig(
        model_path=str(folder),
        cache=CacheConfig(block_size=BLOCK_SIZE, cpu_kv_cache_dtype=kind),
        scheduler=SchedulerConfig(max_model_len=MAX_LEN),
    )
    right = WireDType[kind.resolve(DType.FLOAT32).name]
    check_geometry(make_geometry(model, DType.FLOAT32, kv_dtype=right), model, config, 0)
    wrong = make_geometry(model, DType.FLOAT32, kv_dtype=(right + 1) % 4)
    with pytest.raises(GeometryError, match=f"kv_dtype is {(right + 1) % 4} in the segments"):
        check_geometry(wrong, model, config, 0)
