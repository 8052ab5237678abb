"""The process that owns one GPU: weights, GPU-cache and kernels. It decides nothing."""
