"""The CUDA path: Triton kernels, static buffers, CUDA graphs.

Nothing here is imported unless a CUDA device of compute capability 8.0 or newer is there and
Triton is installed; every operation has a plain PyTorch path in ``gpu_worker.executor``.
"""
