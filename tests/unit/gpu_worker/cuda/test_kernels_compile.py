"""Every Triton kernel of the CUDA path compiles for devices that are not here, and fits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[4]
# Shared memory of a block. Code for 8.0 also runs on 8.6 and 8.9, which have 99 KiB.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
# Past this ptxas has given up on keeping a loop in registers: 8 to 13 KB were seen where tiles were
# too large, some hundred bytes where they were not.
STACK_BYTES = 4096
EXPECTED = {
    "embed_kernel", "add_rms_norm_kernel", "silu_mul_kernel", "rope_store_kernel", "greedy_kernel",
    "decode_kernel", "merge_splits_kernel", "prefill_kernel", "prefill_and_decode_kernel",
    "publish_kernel", "wait_kernel", "collect_kernel", "copy_pages_kernel",
    "ride_kernel",
}  # fmt: skip

LLAMA_8B = {"head-dim": 128, "heads": 32, "kv-heads": 8,
            "hidden": 4096, "inner": 14336, "vocab": 128256}  # fmt: skip
SMOL = {"head-dim": 64, "heads": 9, "kv-heads": 3, "hidden": 576, "inner": 1536, "vocab": 49152}
WIDE = SMOL | {"head-dim": 256, "heads": 8, "kv-heads": 1}
CASES = {
    "8B-bfloat16-hopper": (90, "bfloat16", False, LLAMA_8B),
    "8B-float16-int8-ampere": (80, "float16", True, LLAMA_8B),
    "small-float32-int8-ampere": (80, "float32", True, SMOL),
    "wide-bfloat16-ampere": (80, "bfloat16", False, WIDE),
    "wide-float32-hopper": (90, "float32", True, WIDE),
}
SLOWEST = {"8B-float16-int8-ampere", "wide-float32-hopper"}  # left to `make soak`
MARKED = [pytest.param(c, marks=[pytest.mark.soak] if c in SLOWEST else []) for c in CASES]


@cache
def compiled(case: str) -> list[dict[str, Any]]:
    """By kernel: what ``tests.helpers.compile_kernels`` prints."""
    capability, dtype, int8, sizes = CASES[case]
    command = [sys.executable, "-m", "tests.helpers.compile_kernels"]
    command += ["--capability", str(capability), "--dtype", dtype, *(["--int8"] if int8 else [])]
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
        "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton"),
    }
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MARKED)
def test_kernels_compile_and_fit(case: str) -> None:
    kernels = compiled(case)
    assert {kernel["name"] for kernel in kernels} == EXPECTED
    limit = SHARED_BYTES[CASES[case][0]]
    too_large = [kernel for kernel in kernels if kernel["shared"] > limit]
    assert not too_large, f"more than {limit} bytes of shared memory"
    spilled = [kernel for kernel in kernels if kernel.get("stack", 0) > STACK_BYTES]
    assert not spilled


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MARKED)
def test_nothing_compiles_once_plans_run(case: str) -> None:
    late = [kernel for kernel in compiled(case) if kernel["phase"] != "start"]
    assert not late
