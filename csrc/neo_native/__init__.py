"""Shared-memory contract, lock-free rings and CPU attention, from the C++ extension `_core`."""

from __future__ import annotations

import numpy as np

from neo_native._core import (
    Array,
    AttentionWorker,
    Control,
    CpuCache,
    Exchange,
    Feature,
    LayoutMismatchError,
    NativeError,
    ResultConsumer,
    ResultProducer,
    ResultSlot,
    RowKind,
    RowStatus,
    Segment,
    SegmentKind,
    Sequences,
    SharedMemoryError,
    StepConsumer,
    StepProducer,
    StepSlot,
    SwapKind,
    WireDType,
    WorkerState,
    active_isa,
    attend,
    device_layout,
    geometry_dtype,
    isa_variants,
    logprob_entry_dtype,
    max_biases,
    probe_bells,
    probe_rings,
    read_ceiling,
    result_header_dtype,
    result_row_dtype,
    segment_bytes,
    slot_params_dtype,
    step_header_dtype,
    step_row_dtype,
    swap_dtype,
    token_bias_dtype,
    token_logprob_dtype,
    validate_geometry,
    worker_row_dtype,
)

__all__ = [
    "Array",
    "AttentionWorker",
    "Control",
    "CpuCache",
    "Exchange",
    "Feature",
    "LayoutMismatchError",
    "NativeError",
    "ResultConsumer",
    "ResultProducer",
    "ResultSlot",
    "RowKind",
    "RowStatus",
    "Segment",
    "SegmentKind",
    "Sequences",
    "SharedMemoryError",
    "StepConsumer",
    "StepProducer",
    "StepSlot",
    "SwapKind",
    "WireDType",
    "WorkerState",
    "active_isa",
    "attend",
    "device_layout",
    "geometry_dtype",
    "isa_variants",
    "logprob_entry_dtype",
    "make_geometry",
    "max_biases",
    "probe_bells",
    "probe_rings",
    "read_ceiling",
    "result_header_dtype",
    "result_row_dtype",
    "segment_bytes",
    "slot_params_dtype",
    "step_header_dtype",
    "step_row_dtype",
    "swap_dtype",
    "token_bias_dtype",
    "token_logprob_dtype",
    "validate_geometry",
    "worker_row_dtype",
]


def make_geometry(**fields: int) -> Array:
    """A checked 0-d array of `geometry_dtype`.

    Unnamed fields are 0, but `world_size` 1 and `lease_us` 20000. Raises ValueError that names the
    field, its value and the limit, or the field that does not exist.
    """
    geometry = np.zeros((), geometry_dtype)
    geometry["world_size"] = 1
    geometry["lease_us"] = 20_000
    for name, value in fields.items():
        if name not in (geometry_dtype.names or ()):
            raise ValueError(f"{name} is not a field of the geometry")
        if not 0 <= value < 1 << 32:
            raise ValueError(f"{name} is {value}; it must be from 0 to {(1 << 32) - 1}")
        geometry[name] = value
    validate_geometry(geometry)
    return geometry
