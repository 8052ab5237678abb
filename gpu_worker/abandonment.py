"""The end of a gpu worker for which nobody waits any more.

Where workers are containers the server cannot kill one that hangs. So the worker asks by itself
whether it is still wanted, and a thread ends the process where the main thread never comes to ask.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from neo_native import Control
from neo_native.segments import SERVER_BYTE, SegmentSet, gpu_given_up_byte

logger = logging.getLogger("gpu_worker")

LOOK_S = 1.0
LEAVE_S = 10.0  # the main thread leaves by itself after the plan it is at
STATUS = 75  # EX_TEMPFAIL of sysexits.h: start another


def is_abandoned(segments: SegmentSet, control: Control, rank: int) -> bool:
    """The server is gone or stopping, or has given this worker up: a plan was not answered."""
    return (
        control.stopping
        or not segments.is_locked(SERVER_BYTE)
        or segments.is_locked(gpu_given_up_byte(rank))
    )


def end_when_abandoned(
    segments: SegmentSet, rank: int, look_s: float = LOOK_S, leave_s: float = LEAVE_S
) -> threading.Thread:
    """Starts a thread that ends this process ``leave_s`` seconds after it was abandoned."""
    control = Control(segments.control)

    def watch() -> None:
        while not is_abandoned(segments, control, rank):
            time.sleep(look_s)
        time.sleep(leave_s)
        logger.error("nobody waits for this worker, and it hangs: it ends with status %d", STATUS)
        os._exit(STATUS)

    thread = threading.Thread(target=watch, name="abandonment", daemon=True)
    thread.start()
    return thread
