"""Typed stub of the extension. Every call that computes or waits releases the GIL."""

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# dtypes of protos/wire.hpp, made by the compiler
geometry_dtype: np.dtype[Any]
step_header_dtype: np.dtype[Any]
step_row_dtype: np.dtype[Any]
swap_dtype: np.dtype[Any]
result_header_dtype: np.dtype[Any]
result_row_dtype: np.dtype[Any]
slot_params_dtype: np.dtype[Any]
logprob_entry_dtype: np.dtype[Any]
token_logprob_dtype: np.dtype[Any]
token_bias_dtype: np.dtype[Any]
max_biases: int  # of a slot
worker_row_dtype: np.dtype[Any]

class NativeError(RuntimeError): ...
class LayoutMismatchError(NativeError): ...  # says both values
class SharedMemoryError(NativeError): ...  # "needs X, has Y"

class SegmentKind:
    CONTROL: SegmentKind
    STEPS: SegmentKind
    RESULTS: SegmentKind
    SEQUENCES: SegmentKind
    WORK: SegmentKind
    EXCHANGE: SegmentKind
    CPU_CACHE: SegmentKind
    name: str

class WireDType(IntEnum):  # element types; DType of wire.hpp, by names of protos.config's
    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3

class RowKind(IntEnum):
    PREFILL_GPU = 0
    PREFILL_CPU = 1
    DECODE_GPU = 2
    DECODE_CPU = 3
    RIDE_CPU = 5

class RowStatus(IntEnum):
    COMPUTED = 0
    SAMPLED = 1
    VOIDED = 2

class Feature(IntFlag):  # of a slot, beyond drawing a token
    BIASES = 1
    PENALTIES = 2
    LOGPROBS = 4
    PROMPT_LOGPROBS = 8

class SwapKind(IntEnum):
    OUT = 0
    IN = 1

class WorkerState:
    EMPTY: WorkerState
    STARTING: WorkerState
    READY: WorkerState
    DRAINING: WorkerState
    name: str

def device_layout(geometry: Array) -> dict[str, int]:
    """Byte offsets into the work, exchange and cpu_cache segments, for a device's kernels."""

def validate_geometry(geometry: Array) -> None:
    """`geometry`: 0-d array of geometry_dtype. Raises ValueError that names field, value, limit."""

def segment_bytes(geometry: Array, kind: SegmentKind) -> int:
    """Size of a whole segment of this kind."""

class Segment:
    """One mapped segment. The mapping ends when the object and every view of it are gone."""

    @staticmethod
    def create(fd: int, kind: SegmentKind, geometry: Array, populate_threads: int = 1) -> Segment:
        """Sizes, maps, populates and formats; `version` is stored last.

        Raises SharedMemoryError when the file system has too little room.
        """
    @staticmethod
    def attach(fd: int, kind: SegmentKind, writable: bool = True) -> Segment: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def address(self) -> int: ...

class Control:
    """Worker table, liveness words, core leases. Any process."""

    def __init__(self, segment: Segment) -> None: ...
    @property
    def geometry(self) -> Array: ...  # 0-d copy
    def worker_rows(self) -> Array: ...  # copy, [max_workers] of worker_row_dtype
    def set_server_pid(self, pid: int) -> None: ...
    @property
    def server_pid(self) -> int: ...
    def set_stopping(self) -> None: ...  # server: workers leave
    @property
    def stopping(self) -> bool: ...
    def clear_plans(self) -> None: ...  # server: the gpu worker is gone, and its plans with it
    @property
    def plans(
        self,
    ) -> tuple[int, int]: ...  # in flight with CPU rows; of them published by a device
    def request_drain(self, row: int) -> None: ...  # server: this worker leaves
    def draining(self, row: int) -> bool: ...
    def take_row(self, row: int, pid: int, n_threads: int, spawned: bool = False) -> None:
        """A worker that holds the row's lock: wipes the row and enters itself, state starting."""
    def set_state(self, row: int, state: WorkerState) -> None: ...
    def clear_row(self, row: int) -> None:
        """Empties the row and frees its core leases: the process behind it leaves or is gone."""
    def lease_core(self, core: int, row: int) -> bool: ...  # True: it is this row's now
    def release_cores(self, row: int) -> None: ...

class Sequences:
    """Tables, sampling parameters, biases: numpy views of shared memory."""

    def __init__(self, segment: Segment, geometry: Array) -> None: ...
    params: Array  # [max_slots] of slot_params_dtype
    block_table: Array  # uint32 [max_slots, max_blocks]
    page_table: Array  # uint32 [max_slots, max_pages]
    bias: Array  # [max_slots, max_biases] token_bias_dtype

class StepSlot:
    """One ring slot. Views are valid until publish / release."""

    header: Array  # 0-d, step_header_dtype
    rows: Array  # [max_rows] step_row_dtype
    swaps: Array  # [max_swaps] swap_dtype
    tokens: Array  # int32 [max_tokens]

class ResultSlot:
    header: Array  # 0-d, result_header_dtype
    rows: Array  # [max_rows] result_row_dtype
    logprobs: Array  # [max_rows + max_tokens] logprob_entry_dtype
    top: Array  # [max_rows + max_tokens, max_logprobs] token_logprob_dtype

class StepProducer:
    """Server. A second producer of the same ring is refused (NativeError) while the first lives.

    `takeover`, here and in the other ends: the caller holds the role's liveness lock, so a holder
    that the ring names is dead, whatever process now has its id (containers).
    """

    def __init__(self, segment: Segment, geometry: Array, takeover: bool = False) -> None: ...
    def acquire(self) -> StepSlot | None: ...  # None: ring full
    def publish(self) -> None: ...
    def reset(self, takeover: bool = False) -> None:
        """Empties the ring; only while no consumer lives.

        `takeover`: the caller knows that none does, whatever the pid in the ring says.
        """

class StepConsumer:
    """gpu_worker."""

    def __init__(self, segment: Segment, geometry: Array, takeover: bool = False) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...  # True: front() has a slot
    def front(self) -> StepSlot | None: ...
    def release(self) -> None: ...
    def reset(self) -> None: ...  # drops what is published

class ResultProducer:
    def __init__(self, segment: Segment, geometry: Array, takeover: bool = False) -> None: ...
    def acquire(self) -> ResultSlot | None: ...
    def publish(self) -> None: ...
    def reset(self, takeover: bool = False) -> None:
        """Empties the ring; only while no consumer lives.

        `takeover`: the caller knows that none does, whatever the pid in the ring says.
        """

class ResultConsumer:
    def __init__(self, segment: Segment, geometry: Array, takeover: bool = False) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...
    def front(self) -> ResultSlot | None: ...
    def release(self) -> None: ...
    def reset(self) -> None: ...  # drops what is published

def probe_rings(
    steps: Segment,
    results: Segment,
    geometry: Array,
    ping: bool,
    n: int,
    spin_us: int,
    gap_us: int = 0,
    timeout_s: float = 10.0,
) -> tuple[Array, Array]:
    """Plays one side of `n` round trips over both rings with another process; for benchmarks.

    Returns nanoseconds, uint64: one-way times [n] of what this side received, and round trips ([n]
    for ping, [0] for pong). `gap_us`: ping's pause before each. Raises NativeError when the other
    side is silent for `timeout_s`, or another process holds a ring's role.
    """

def probe_bells(
    work: Segment,
    geometry: Array,
    ping: bool,
    n: int,
    spin_us: int,
    gap_us: int = 0,
    timeout_s: float = 10.0,
) -> tuple[Array, Array]:
    """The same over two doorbells. A `work` segment serves for one such game only."""

class CpuCache:
    """Paged K and V in host memory. Rows come as arrays in act_dtype; 16-bit floats as uint16.

    `threads`: how many share a long span.
    """

    def __init__(
        self, segment: Segment, sequences: Sequences, geometry: Array, threads: int = 1
    ) -> None: ...
    def store_rows(self, layer: int, slots: Array, positions: Array, k: Array, v: Array) -> None:
        """One token per row. slots, positions: uint32 [n]; k, v: [n, n_kv_heads, head_dim]."""
    def store_span(self, layer: int, slot: int, start: int, k: Array, v: Array) -> None:
        """Tokens [start, start + n) of one slot. k, v: [n, n_kv_heads, head_dim]."""
    def load_span(self, layer: int, slot: int, start: int, k: Array, v: Array) -> None:
        """The reverse: fills k and v."""

class Exchange:
    """gpu_worker's side of the hand-over to the cpu workers."""

    def __init__(
        self, control: Control, work: Segment, exchange: Segment, geometry: Array
    ) -> None: ...
    def begin_plan(
        self,
        plan_id: int,
        slots: tuple[Array, Array],
        seq_lens: tuple[Array, Array],
        moves: Sequence[tuple[int, int, Array, Array, Array]] = ...,
    ) -> None:
        """Writes the work descriptors and marks the pool active.

        Per sub-batch uint32 arrays of its decode_cpu rows (may be empty). `moves`, by stage: group,
        stage, and uint32 [riders] each indices in the group, slots and lengths. Chooses splits by
        the worker table's threads. Raises IndexError or ValueError for what does not fit, and for
        moves that do not follow from the plans before.
        """
    def publish(self, channel: int, layer: int, q: Array) -> None:
        """q: [n, n_heads, head_dim] in act_dtype, already stored K/V. Rings."""
    def wait(self, channel: int, timeout_s: float) -> bool:
        """Until the published job is done. Runs signal handlers meanwhile.

        False: time is up (the caller may wait on or abort), or the job was aborted.
        """
    def abort(self, channel: int) -> None:
        """Gives the published job up."""
    def collect(self, channel: int, out: Array) -> None:
        """Merges the splits by log-sum-exp into out: [n, n_heads, head_dim] in act_dtype."""
    def end_plan(self) -> None: ...  # aborts what is not done
    def announce(
        self,
        plan_id: int,
        slots: tuple[Array, Array],
        seq_lens: tuple[Array, Array],
        moves: Sequence[tuple[int, int, Array, Array, Array]] = ...,
    ) -> tuple[tuple[int, int, Array], ...]:
        """As begin_plan, for a plan whose publishes and waits a device does.

        Several may be announced. Per channel: the epoch of layer 0 (0: no rows), the number
        of tasks, and uint32 [rows, 2] first task and splits of each row. Raises NativeError
        while the descriptor's slot is another plan's.
        """
    def abort_through(self, channel: int, epoch: int) -> None:
        """Gives up the channel's jobs up to this epoch."""
    def done_epoch(self, channel: int) -> int: ...  # of the channel's last finished job
    def retire(self, plan_id: int) -> None: ...  # the device is through with the plan
    def announced_moves(self) -> list[tuple[int, int, int, Array]]:
        """Of the plan begun or announced last, move by move.

        The number of the job that it takes back, of the one that it publishes (0: none), the tasks
        of the latter, and of the former uint32 [riders, 2] first task and splits of each rider.
        """
    def ride_publish(self, group: int, q: Array) -> None:
        """As publish, for riders of the plan: q [riders, n_heads, head_dim]. By growing stage."""
    def ride_wait(self, group: int, timeout_s: float) -> bool:
        """As wait, for the job that the group's last plan published."""
    def ride_collect(self, group: int, out: Array) -> None: ...  # as collect; of the plan's riders
    def ride_give_up(self) -> None: ...  # every published job of riders that is not done
    def ride_given_up(self, group: int) -> bool: ...  # the job that ride_wait would wait for
    def ride_abort_through(self, job: int) -> None: ...  # those up to this number
    def ride_progress(self) -> int: ...  # grows whenever a job of riders is done
    def ride_tasks(self, group: int) -> int: ...  # of the job that the plan's move publishes
    def n_tasks(self, channel: int) -> int: ...  # of the plan's jobs on this channel
    def live_workers(self) -> int: ...  # rows whose state is ready

class AttentionWorker:
    """The whole hot path of a cpu worker: threads that claim, attend, finish."""

    def __init__(
        self,
        control: Control,
        work: Segment,
        exchange: Segment,
        cpu_cache: Segment,
        sequences: Segment,
        row: int,
        n_threads: int,
        cores: list[int] = ...,  # pin thread i to cores[i]; empty: unpinned
        fault: str = "",  # tests only: "POINT=ACTION@N", see csrc/attn_worker/fault.hpp
    ) -> None: ...
    def record(self, timeline: object) -> None: ...  # before start: a writable buffer, kept
    def start(self) -> None: ...  # then the row's state is ready
    def stop(self) -> None: ...  # finishes claimed tasks, joins the threads; state draining
    def heartbeat(self) -> None: ...  # publishes counters into the worker row

def attend(
    q: Array,
    cache: CpuCache,
    layer: int,
    slots: Array,
    seq_lens: Array,
    isa: str = "auto",
    n_splits: int = 1,
) -> Array:
    """Decode attention in the caller's thread: tests and benchmarks. q: [n, n_heads, head_dim].

    `isa`: a name of isa_variants(), or "auto": the best, or what NEO_CPU_ISA names. `n_splits`:
    each sequence is computed in that many parts and merged. Raises ValueError for an instruction
    set that cannot run here, IndexError for rows that do not fit.
    """

def read_ceiling(segment: Segment, threads: int) -> dict[str, float]:
    """Reads the whole segment once per read pattern; bytes per second by pattern."""

def isa_variants() -> list[str]:
    """Kernel variants that this machine can run, best first."""

def active_isa() -> str: ...

class SpanKind(IntEnum):  # what a span of the timeline is
    ITERATION = 0
    LINEAR = 1
    HANDOFF = 2
    GPU_ATTN = 3
    CPU_WAIT = 4
    COLLECT = 5
    SWAP = 6
    HEAD = 7
    ATTEND = 8

timeline_header_dtype: np.dtype[Any]
lane_header_dtype: np.dtype[Any]
span_dtype: np.dtype[Any]
timeline_magic: int
device_lane: int  # of the gpu worker
first_cpu_lane: int
