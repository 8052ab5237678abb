from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Segments(_message.Message):
    __slots__ = ("instance_id", "prefix", "shm_dir")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SHM_DIR_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    prefix: str
    shm_dir: str
    def __init__(self, instance_id: _Optional[str] = ..., prefix: _Optional[str] = ..., shm_dir: _Optional[str] = ...) -> None: ...

class RegisterGpuWorkerRequest(_message.Message):
    __slots__ = ("pid", "rank")
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    pid: int
    rank: int
    def __init__(self, pid: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class RegisterGpuWorkerResponse(_message.Message):
    __slots__ = ("segments", "config_json")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    segments: Segments
    config_json: str
    def __init__(self, segments: _Optional[_Union[Segments, _Mapping]] = ..., config_json: _Optional[str] = ...) -> None: ...

class ReportGpuReadyRequest(_message.Message):
    __slots__ = ("pid", "rank", "num_gpu_blocks", "device", "profile_json", "plan_modes")
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    PLAN_MODES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    rank: int
    num_gpu_blocks: int
    device: str
    profile_json: str
    plan_modes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pid: _Optional[int] = ..., rank: _Optional[int] = ..., num_gpu_blocks: _Optional[int] = ..., device: _Optional[str] = ..., profile_json: _Optional[str] = ..., plan_modes: _Optional[_Iterable[str]] = ...) -> None: ...

class ReportGpuReadyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterCpuAttnWorkerRequest(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class RegisterCpuAttnWorkerResponse(_message.Message):
    __slots__ = ("segments", "num_threads", "pin_threads", "reserved_cores")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    PIN_THREADS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_CORES_FIELD_NUMBER: _ClassVar[int]
    segments: Segments
    num_threads: int
    pin_threads: bool
    reserved_cores: int
    def __init__(self, segments: _Optional[_Union[Segments, _Mapping]] = ..., num_threads: _Optional[int] = ..., pin_threads: _Optional[bool] = ..., reserved_cores: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("cpu_attn_workers",)
    CPU_ATTN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    cpu_attn_workers: int
    def __init__(self, cpu_attn_workers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: int
    def __init__(self, previous: _Optional[int] = ...) -> None: ...
