"""Without a device the kernels run in Triton's interpreter: chosen before the first import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
