"""Many swaps beside decodes: copies on streams of their own leave what one stream would leave."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from neo_native import WireDType
from protos.config import DType
from tests.gpu.kernel_rig import KernelRig, config_of, inference
from tests.gpu.serving_rig import NEW_TOKENS, REQUESTS, SIZES, runner_on, serve

__all__ = ["inference"]  # a fixture of every test


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("int8", [False, True], ids=["as computed", "int8"])
def test_copies_beside_decodes_leave_what_one_stream_leaves(graphs: bool, int8: bool) -> None:
    dtype = DType.BFLOAT16
    kv_code = WireDType.INT8 if int8 else WireDType[dtype.name]
    left = []
    for one_stream in (True, False):
        rig = KernelRig(config_of(64, 4, 2), dtype, SIZES.block_size, kv_code)
        rig.cache.blocks.zero_()
        with rig.worker(threads=2):
            runner = runner_on(rig, graphs, one_stream)
            left.append(serve(rig, runner, SIZES, REQUESTS))
        rig.close()
    alone, beside = left
    assert alone.swaps == beside.swaps > 50
    assert all(len(tokens) == NEW_TOKENS for tokens in alone.tokens)
    assert beside.tokens == alone.tokens
    assert torch.equal(beside.gpu, alone.gpu)
    assert beside.cpu == alone.cpu
