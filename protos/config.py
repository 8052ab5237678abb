"""Typed, frozen configuration that the server and its workers share.

Built and validated once, at the command line; travels to the gpu worker as JSON.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
# Kinds of plan, by names of neo_server.plan.Mode. gpu_only: no row of any kind for the CPU-cache.
PlanMode = Literal["gpu_only", "one_batch", "two_batches", "piggyback"]
PLAN_MODES: tuple[PlanMode, ...] = get_args(PlanMode)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DType(StrEnum):
    """Element types by the names that Hugging Face configurations use."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


class KvCacheDType(StrEnum):
    """Element types of the CPU-cache. int8: with a float32 scale per token and KV head."""

    AUTO = "auto"  # the activations'
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    def resolve(self, activations: DType) -> KvCacheDType:
        """Never AUTO."""
        return KvCacheDType(activations.value) if self is KvCacheDType.AUTO else self

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of K (or V) of one token and KV head. Raises ValueError for AUTO."""
        if self is KvCacheDType.INT8:
            return head_dim + 4
        return head_dim * DType(self.value).itemsize


class CacheConfig(_Frozen):
    """Sizes of the GPU-cache and the CPU-cache."""

    block_size: Positive = 16  # tokens of a GPU-cache block
    num_gpu_blocks_override: Positive | None = None
    kv_cache_memory_bytes: Positive | None = None  # of the GPU-cache
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    # GiB of the CPU-cache
    kv_offloading_size: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    cpu_kv_page_size: Positive = 64  # tokens of a CPU-cache page
    cpu_kv_cache_dtype: KvCacheDType = KvCacheDType.AUTO
    shm_dir: str | None = None  # None: POSIX shared memory


class SchedulerConfig(_Frozen):
    """What one iteration may hold."""

    scheduling_policy: str = "neo"  # a name of neo_server.policies, or "module:attribute"
    # Kinds of plan that the policy makes: what the gpu worker captures and measures
    plan_modes: tuple[PlanMode, ...] = PLAN_MODES
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    max_model_len: Positive = 2048
    enable_chunked_prefill: bool = True
    # Alternatives that are told beside a token: room for them is in every result.
    max_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    max_skipped_iterations: Positive = 32  # in a row, for a CPU-request that could decode
    # Places of each of the num_hidden_layers + 1 groups of riders; 0: no piggybacking
    ride_capacity: Annotated[int, Field(ge=0, le=4096)] = 0
    tpot_slo_s: Annotated[float, Field(gt=0.0)] | None = None  # of an iteration; None: none
    ttft_slo_s: Annotated[float, Field(gt=0.0)] | None = None  # from arrival to the first token

    @model_validator(mode="after")
    def _whole_prompt_fits(self) -> SchedulerConfig:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; without chunked prefill "
                f"it must be at least max_model_len, {self.max_model_len}"
            )
        return self


class WorkerConfig(_Frozen):
    """How the worker processes run."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: DType = DType.FLOAT32  # of weights, activations and GPU-cache
    # auto: Triton kernels on CUDA devices of capability 8.0 or newer, else plain PyTorch
    kernel_backend: Literal["auto", "torch", "triton"] = "auto"
    enforce_eager: bool = False  # no CUDA graphs
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0  # of dummy weights
    torch_threads: NonNegative = 0  # 0: PyTorch's choice
    cpu_attn_workers: NonNegative = 2  # processes the server runs itself
    cpu_attn_threads: Positive = 1  # attention threads of each
    pin_cpu_attn_threads: bool = False  # each to a core of its own
    reserved_cores: NonNegative = 0  # the first of the usable ones, which no thread is pinned to
    spin_us: NonNegative = 0  # how long a waiter spins before it sleeps
    lease_us: Positive = 20_000  # a claim older than this may be taken over
    profile: bool = True  # stage times at start, for the cost model
    profile_dir: str | None = None  # where they are kept; None: the user's cache directory
    cpu_attn_timeout_s: Annotated[float, Field(gt=0.0)] = 10.0  # then a plan's CPU rows are voided


class EngineConfig(_Frozen):
    """Everything a gpu worker needs to know."""

    model_path: str  # a local Hugging Face directory
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()

    @property
    def offloads(self) -> bool:
        """Plans may have rows for the CPU-cache, and there is one."""
        return self.cache.kv_offloading_size > 0 and any(
            mode != "gpu_only" for mode in self.scheduler.plan_modes
        )
