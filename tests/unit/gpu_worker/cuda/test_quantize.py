"""The device's quantiser, in Triton's interpreter, byte for byte against the extension's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import neo_native as native
from protos.config import DType
from protos.model_config import ModelConfig
from tests.helpers.engine_rig import PAGE_SIZE, make_geometry, make_segment
from tests.helpers.tiny_llama import make_checkpoint

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a device", allow_module_level=True)

from gpu_worker.cuda.page_copies import copy_pages_kernel  # noqa: E402  (needs Triton)
from gpu_worker.cuda.spans import HostSwap, span_table  # noqa: E402

TOKENS, LAYER, PROGRAMS = 20, 1, 3
ROWS = 8  # of a group: three groups, in two pages


def test_pages_copied_out_hold_what_the_extension_would_store(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3.2")
    config = ModelConfig.from_pretrained(tmp_path)
    geometry = make_geometry(config, DType.FLOAT32, kv_dtype=native.WireDType.INT8)
    sequences_segment = make_segment(native.SegmentKind.SEQUENCES, geometry)
    sequences = native.Sequences(sequences_segment, geometry)
    sequences.page_table[0] = np.arange(sequences.page_table.shape[1])
    heads, dim = config.num_key_value_heads, config.head_dim
    random = torch.Generator().manual_seed(5)
    kv = torch.randn(2, TOKENS, heads, dim, generator=random) * 3
    kv[:, 4] = 0.0
    kv[0, 5, 0, :3] = torch.tensor([127.0, 0.5, 1.5])  # ties go to even
    expected = make_segment(native.SegmentKind.CPU_CACHE, geometry)
    cache = native.CpuCache(expected, sequences, geometry)
    cache.store_span(LAYER, 0, 0, kv[0].numpy(), kv[1].numpy())

    made = torch.zeros(expected.size, dtype=torch.uint8)
    at = native.device_layout(geometry)
    pages = np.arange(-(-TOKENS // PAGE_SIZE), dtype=np.int32)
    table = span_table([HostSwap(native.SwapKind.OUT, 0, TOKENS, pages[:1], pages)], ROWS)
    copy_pages_kernel[(PROGRAMS,)](
        kv[None, :, None], kv.numel(), kv.stride(0),
        made[at["tiles"] :].view(torch.int8),
        made[at["tiles"] + at["scales"] :].view(torch.float32),
        torch.from_numpy(table.ints), table.groups_at, table.entries_at, 0, table.n_groups,
        LAYER, 1, TOKENS, PAGE_SIZE,
        int(geometry["n_pages"]), at["tile_bytes"], at["tile_bytes"] // 4,
        KV_HEADS=heads, HEAD_DIM=dim, DIM_PAD=triton.next_power_of_2(dim), ROWS=ROWS, TILES=2,
        TO_CPU=True, INT8=True, OPEN=False,
    )  # fmt: skip

    stored = native_bytes(expected)
    assert stored[at["tiles"] :].any()
    np.testing.assert_array_equal(made.numpy()[at["tiles"] :], stored[at["tiles"] :])


def native_bytes(segment: native.Segment) -> npt.NDArray[np.uint8]:
    """A copy of the segment."""
    return np.frombuffer(ctypes.string_at(segment.address, segment.size), np.uint8)
