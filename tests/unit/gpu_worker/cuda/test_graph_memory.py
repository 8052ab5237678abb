"""How much memory is kept for captured graphs, and what is said of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("triton")

from gpu_worker.cuda.buckets import Buckets, decode_shape, mixed_shape
from gpu_worker.cuda.graph_memory import PART_BYTES, POOL_BYTES, graph_bytes
from gpu_worker.cuda.graphs import Graphs
from protos.config import PLAN_MODES

MIB = 1 << 20


def test_graphs_take_memory_by_layers_sub_batches_and_branches() -> None:
    decodes, prefills = decode_shape(0, 8, False), mixed_shape(64, 64, 4, False)
    chunked = mixed_shape(64, 64, 4, True)
    for key, parts in (
        ((decodes,), 1),
        ((prefills,), 1),
        ((chunked,), 2),
        ((chunked, decode_shape(1, 8, True)), 3),
    ):
        assert graph_bytes([key], 5) == POOL_BYTES + 5 * parts * PART_BYTES
    assert graph_bytes([], 5) == 0


@pytest.mark.parametrize(
    ("modes", "measured"), [(("gpu_only",), 160 * MIB), (PLAN_MODES, 1220 * MIB)]
)
def test_the_estimate_holds_what_was_measured(modes: Any, measured: int) -> None:
    """An H200, 32 layers, 256 sequences, 2048 batched tokens, riders in groups of 16."""
    estimate = graph_bytes(Buckets(256, 2048, 16).keys(modes), 32)
    assert measured < estimate < 1.25 * measured


@pytest.mark.parametrize("more", [0, 3 * MIB])
def test_the_log_says_what_was_estimated_and_warns_when_it_was_too_little(
    more: int, caplog: pytest.LogCaptureFixture
) -> None:
    buffers = SimpleNamespace(rides=None)
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4))
    graphs = Graphs(cast(Any, SimpleNamespace(buffers=buffers, model=model)), 8, 64)
    graphs._graphs = {key: cast(Any, None) for key in Buckets(8, 64).keys(("gpu_only",))}
    estimate = graph_bytes(graphs._graphs, 4)
    with caplog.at_level(logging.INFO):
        graphs._report(1.0, estimate + more)
    first, *warnings = caplog.records
    assert f"{estimate / MIB:.0f} were estimated" in first.getMessage()
    assert [w.levelname for w in warnings] == ["WARNING"] * (more > 0)
    assert all("3 MiB" in w.getMessage() for w in warnings)
