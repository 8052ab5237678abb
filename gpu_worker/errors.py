"""What can go wrong in the gpu worker. Each of these ends the process with a message.

GpuWorkerError
├── CheckpointError     the files of the model are not what the configuration says
├── CacheSizeError      the GPU-cache cannot be made as asked
├── DeviceError         the device asked for is not there
│   └── PinningError    the driver refuses to pin a shared segment
├── GeometryError       the shared segments were made for another model
└── BadPlanError        the server sent a plan that cannot be run
"""

from __future__ import annotations


class GpuWorkerError(RuntimeError):
    """Base of all errors of this package."""


class CheckpointError(GpuWorkerError):
    """A tensor is missing, unexpected, of another shape or of another type; names it."""


class CacheSizeError(GpuWorkerError):
    """The GPU-cache cannot be made; says how much it needs and how much there is."""


class DeviceError(GpuWorkerError):
    """The device asked for is not usable here."""


class PinningError(DeviceError):
    """The driver refuses to pin a shared segment; names size, offset and the driver's error."""


class GeometryError(GpuWorkerError):
    """The segments' geometry and the model disagree; names the field and both values."""


class BadPlanError(GpuWorkerError):
    """A plan breaks the contract of ``protos/wire.hpp``; names plan, field, value and limit."""
