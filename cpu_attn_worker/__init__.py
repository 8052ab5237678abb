"""Stateless CPU-attention worker: claims tasks in shared memory, attends, finishes."""
