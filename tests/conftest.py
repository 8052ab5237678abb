from __future__ import annotations

import os
import signal
from pathlib import Path

# Stage times that gpu workers measure at their start are kept here, not in the user's home.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parent.parent / ".cache")

# Without a device the Triton kernels run in its interpreter, which is chosen by its first import.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job ignores SIGINT, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
