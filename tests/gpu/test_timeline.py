"""A recorded plan computes what others compute; its graph's stages lie where they ran."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

from neo_native import WireDType
from neo_native.location import Location
from neo_native.timeline import DEVICE_LANE, SpanKind, Timeline
from protos.config import DType
from tests.gpu.kernel_rig import KernelRig, config_of, inference
from tests.gpu.serving_rig import REQUESTS, SIZES, runner_on, serve

__all__ = ["inference"]  # a fixture of every test

FIRST, LAST = 20, 60  # plans
IN_LINE = (SpanKind.LINEAR, SpanKind.HANDOFF, SpanKind.CPU_WAIT, SpanKind.GPU_ATTN, SpanKind.HEAD)


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
def test_recorded_plans_leave_what_others_leave_and_their_stages_in_order(
    graphs: bool, tmp_path: Path
) -> None:
    left = []
    timeline = Timeline.create(Location("cuda", str(tmp_path)), lanes=3, spans=1 << 14)
    timeline.window(FIRST, LAST)
    for recorded in (False, True):
        rig = KernelRig(config_of(64, 4, 2), DType.BFLOAT16, SIZES.block_size, WireDType.BFLOAT16)
        rig.cache.blocks.zero_()
        with rig.worker(threads=2):
            runner = runner_on(rig, graphs, one_stream=False)
            if recorded:
                runner.record(timeline)
            left.append(serve(rig, runner, SIZES, REQUESTS))
            if runner._recorder is not None:
                kept = runner._recorder._graphs._free.values()
                assert (sum(len(free) for free in kept) > 0) == graphs
        rig.close()
    plain, beside = left
    assert beside.tokens == plain.tokens
    assert beside.cpu == plain.cpu

    (lane,) = timeline.recorded()
    assert (lane.index, lane.lost) == (DEVICE_LANE, 0)
    plans = defaultdict(list)
    for span in lane.spans:
        plans[int(span["plan_id"])].append(span)
    assert sorted(plans) == list(range(FIRST, LAST))
    kinds = {SpanKind(int(span["kind"])) for span in lane.spans}
    assert {*IN_LINE, SpanKind.SWAP, SpanKind.ITERATION} <= kinds
    for spans in plans.values():
        (whole,) = (span for span in spans if span["kind"] == SpanKind.ITERATION)
        stages = [span for span in spans if SpanKind(int(span["kind"])) in IN_LINE]
        for channel in {int(span["channel"]) for span in stages}:
            of_one = [s for s in stages if s["channel"] == channel]
            layers = [int(s["layer"]) for s in of_one if s["kind"] == SpanKind.LINEAR]
            assert layers == list(range(rig.config.num_hidden_layers + 1))
        edges = [int(span[name]) for span in stages for name in ("begin_ns", "end_ns")]
        assert edges == sorted(edges)
        assert whole["begin_ns"] <= edges[0]
        assert edges[-1] <= whole["end_ns"]
