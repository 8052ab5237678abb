"""Every error that the server raises, and the one place where errors become gRPC status.

::

    NeoError                      INTERNAL
    ├── InvalidRequestError       INVALID_ARGUMENT     names the field, the value and the limit
    ├── UnauthenticatedError      UNAUTHENTICATED      the api key is missing or another
    ├── UnknownModelError         NOT_FOUND            another model is served
    ├── DuplicateRequestError     ALREADY_EXISTS       the request id is in use
    ├── OverloadedError           RESOURCE_EXHAUSTED   the waiting queue is full
    ├── DeadlineError             DEADLINE_EXCEEDED    the call's time is over
    ├── CancelledRequestError     CANCELLED            by its client
    ├── UnavailableError          UNAVAILABLE
    │   ├── NotReadyError                              the model is still loading
    │   ├── ShuttingDownError                          the server takes no new work
    │   └── GpuWorkerDiedError                         the engine recomputes its requests
    │       └── GpuWorkerHungError                     so it does when the worker does not answer
    ├── PlanCrashError            INTERNAL             a plan ends every gpu worker that runs it
    ├── PlanError                 INTERNAL             a policy proposed an impossible plan
    ├── WorkerStartError          INTERNAL             a worker ended before it was ready
    └── ConfigurationError        INTERNAL             the command line asks for the impossible
"""

from __future__ import annotations

import grpc


class NeoError(Exception):
    """Root of the tree."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL


class InvalidRequestError(NeoError):
    """The request can never be served; the message names field, value and limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, param: str | None = None) -> None:
        """``param``: the field's name, for protocols that have a place for it."""
        super().__init__(message)
        self.param = param


class UnauthenticatedError(NeoError):
    """The api key is missing, or is not the server's."""

    code = grpc.StatusCode.UNAUTHENTICATED


class UnknownModelError(NeoError):
    """The request names another model than the one that is served."""

    code = grpc.StatusCode.NOT_FOUND


class DuplicateRequestError(NeoError):
    """A request with this id is being served."""

    code = grpc.StatusCode.ALREADY_EXISTS


class OverloadedError(NeoError):
    """The waiting queue is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineError(NeoError):
    """The time that the call was given is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CancelledRequestError(NeoError):
    """The request was cancelled by its client."""

    code = grpc.StatusCode.CANCELLED


class UnavailableError(NeoError):
    """Try again later, or elsewhere."""

    code = grpc.StatusCode.UNAVAILABLE


class NotReadyError(UnavailableError):
    """The model is still loading."""


class ShuttingDownError(UnavailableError):
    """The server takes no new work."""


class GpuWorkerDiedError(UnavailableError):
    """The gpu worker ended while a plan was in flight."""


class GpuWorkerHungError(GpuWorkerDiedError):
    """The gpu worker has not answered a plan in time."""


class PlanCrashError(NeoError):
    """Gpu workers die or hang, one after the other, on plans that name this request."""


class PlanError(NeoError):
    """A policy proposed a plan that overcommits something or names what is not there."""


class WorkerStartError(NeoError):
    """A worker ended before it was ready."""


class ConfigurationError(NeoError):
    """The command line asks for something impossible."""


def to_status(error: NeoError) -> tuple[grpc.StatusCode, str]:
    """The gRPC status of an error: code and message."""
    return error.code, str(error) or type(error).__name__


def from_status(code: grpc.StatusCode, message: str) -> NeoError:
    """What a client raises: of the classes right below ``NeoError`` the one with this status."""
    for kind in NeoError.__subclasses__():
        if vars(kind).get("code") is code:
            return kind(message)
    return NeoError(message if code is grpc.StatusCode.INTERNAL else f"{code.name}: {message}")
