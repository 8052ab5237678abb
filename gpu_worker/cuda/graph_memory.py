"""What captured graphs take of the device's memory, before they are there."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.cuda.buckets import Key

# By the log of `neo serve` on an H200 (PyTorch 2.11, 32 layers, bf16), in MiB: 51 graphs of
# gpu-only 158 (Llama-3.1-8B) and 160 (Llama-2-7B); 258 of neo, with 331 sub-batches, 890 and 838;
# the same since 112 of them have a branch that loads an earlier chunk, 1220 and 1132. Less 32 for
# what they share (a product's workspace, assumed), these are per layer 78 to 83 KiB a sub-batch
# and 84 to 94 a branch.
POOL_BYTES = 32 << 20
PART_BYTES = 96 << 10


def graph_bytes(keys: Iterable[Key], layers: int) -> int:
    """Estimate for a model of so many layers, some 10 to 20 % above what was measured."""
    parts = sum(len(key) + any(shape.chunk_place for shape in key) for key in keys)
    return POOL_BYTES + parts * layers * PART_BYTES if parts else 0
