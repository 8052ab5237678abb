"""The CUDA path: Triton kernels, static buffers, CUDA graphs.

Nothing here is imported unless a CUDA device of compute capability 8.0 or newer is there and
Triton is installed; every operation has a plain PyTorch path in ``gpu_worker.executor``.
"""

import os

# Multiply-adds are fused. Triton 3.10 does not by default, and 3.9 warns that this will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
