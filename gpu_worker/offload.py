"""The way to the CPU-cache and to the cpu workers: Q, K, V out, O back.

The extension takes numpy arrays in host memory, 16-bit floats as uint16. A tensor on the CPU is
passed as it is; one on a CUDA device goes through pinned staging and a stream synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import CpuDecodes, Plan
from gpu_worker.errors import BadPlanError
from gpu_worker.riders import RiderGroup

if TYPE_CHECKING:
    from neo_native import CpuCache, Exchange

Array = npt.NDArray[Any]

WAIT_SLICE_S = 0.25  # how soon a wait notices that the process should leave


def as_numpy(tensor: Tensor) -> Array:
    """A view of a contiguous CPU tensor; 16-bit floats as uint16."""
    if tensor.dtype is torch.float32:
        array: Array = tensor.numpy()
        return array
    return tensor.view(torch.int16).numpy().view(np.uint16)


class Staging:
    """Host memory for one kind of tensor, [capacity, heads, head_dim]."""

    def __init__(
        self, capacity: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._buffer = torch.empty(
            (capacity, heads, head_dim), dtype=dtype, pin_memory=device.type == "cuda"
        )

    def host(self, rows: int) -> Tensor:
        """The first rows, to be filled."""
        return self._buffer[:rows]

    def download(self, tensor: Tensor) -> Array:
        """A host view; on CUDA a copy that is ready after the stream is synchronised."""
        if self._device.type == "cpu":
            return as_numpy(tensor.contiguous())
        host = self.host(len(tensor))
        host.copy_(tensor, non_blocking=True)
        return as_numpy(host)


class Offload:
    """What one plan does with the CPU-cache and the cpu workers."""

    def __init__(
        self,
        exchange: Exchange,
        cache: CpuCache,
        geometry: Array,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
        keep_waiting: Callable[[], bool] = lambda: True,
    ) -> None:
        """``keep_waiting``: false ends every wait at once, since the process is to leave."""
        self._exchange = exchange
        self._cache = cache
        self._device = device
        self._timeout_s = timeout_s
        self._keep_waiting = keep_waiting
        heads, head_dim = int(geometry["n_heads"]), int(geometry["head_dim"])
        kv_heads, max_rows = int(geometry["n_kv_heads"]), int(geometry["max_rows"])
        span = max(max_rows, int(geometry["max_pages"]) * int(geometry["page_size"]))
        self._rows = Staging(max_rows, heads, head_dim, dtype, device)
        self._k = Staging(span, kv_heads, head_dim, dtype, device)
        self._v = Staging(span, kv_heads, head_dim, dtype, device)
        self._active = False
        self._voided: set[int] = set()
        self._tasks = 0

    @property
    def tasks(self) -> int:
        """Attention tasks given to the cpu workers by the plan begun last, over its layers."""
        return self._tasks

    @property
    def voided(self) -> frozenset[int]:
        """Channels of the plan begun last whose CPU rows were given up."""
        return frozenset(self._voided)

    def begin(self, plan: Plan) -> None:
        """Announces the plan's decode_cpu rows and riders, if any, which wakes the pool.

        Raises ``BadPlanError`` for riders that do not follow from the plans before.
        """
        self._voided.clear()
        self._tasks = 0
        slots, seq_lens = zip(*(plan.channel_rows(channel) for channel in (0, 1)), strict=True)
        self._active = any(map(len, slots)) or len(plan.riders) > 0
        if self._active:
            moves = [group.move for group in plan.riders]
            try:
                self._exchange.begin_plan(plan.plan_id, slots, seq_lens, moves)
            except ValueError as error:  # riders that do not follow from the plans before
                self._active = False
                raise BadPlanError(f"plan {plan.plan_id}: {error}") from error

    @contextmanager
    def trial(self, slots: Array, seq_lens: Array) -> Iterator[None]:
        """A plan of decode_cpu rows alone on channel 0, to measure; uint32 [rows] each."""
        self._voided.clear()
        none = np.empty(0, np.uint32)
        self._exchange.begin_plan(0, (slots, none), (seq_lens, none))
        try:
            yield
        finally:
            self._exchange.end_plan()

    def end(self) -> None:
        """The plan is over, however it ended."""
        if self._active:
            self._active = False
            self._exchange.end_plan()

    def store_rows(self, layer: int, rows: CpuDecodes | RiderGroup, k: Tensor, v: Tensor) -> None:
        """New K and V of decodes, [rows, kv_heads, head_dim], into their pages."""
        host_k, host_v = self._download(k, v)
        self._cache.store_rows(layer, rows.slots, rows.positions, host_k, host_v)

    def store_span(self, layer: int, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """Tokens [start, start + n) of one slot, [n, kv_heads, head_dim]."""
        host_k, host_v = self._download(k, v)
        self._cache.store_span(layer, slot, start, host_k, host_v)

    def load_span(self, layer: int, slot: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Tokens [0, n_tokens) of one slot, valid until the next call."""
        k, v = self._k.host(n_tokens), self._v.host(n_tokens)
        self._cache.load_span(layer, slot, 0, as_numpy(k), as_numpy(v))
        if self._device.type == "cpu":
            return k, v
        on_device = k.to(self._device, non_blocking=True), v.to(self._device, non_blocking=True)
        self._synchronize()  # the buffers are filled again by the next call
        return on_device

    def publish(self, channel: int, layer: int, q: Tensor) -> None:
        """Q of the channel's decode_cpu rows, [rows, heads, head_dim]; K and V are stored."""
        if channel in self._voided:
            return
        host = self._rows.download(q)
        self._synchronize()
        self._exchange.publish(channel, layer, host)
        self._tasks += self._exchange.n_tasks(channel)

    def wait(self, channel: int) -> bool:
        """Until the published job is done. False: the channel is void for the rest of the plan."""
        if channel in self._voided:
            return False
        if self._wait(lambda seconds: self._exchange.wait(channel, seconds)):
            return True
        self._exchange.abort(channel)
        self._voided.add(channel)
        return False

    def _wait(
        self, wait: Callable[[float], bool], given_up: Callable[[], bool] = lambda: False
    ) -> bool:
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0 and self._keep_waiting():
            if wait(min(left, WAIT_SLICE_S)):
                return True
            if given_up():
                break
        return False

    def collect(self, channel: int, out: Tensor) -> None:
        """O of a finished job into ``out``, contiguous [rows, heads, head_dim]."""
        self._collect(lambda array: self._exchange.collect(channel, array), out)

    def _collect(self, collect: Callable[[Array], None], out: Tensor) -> None:
        if self._device.type == "cpu":
            collect(as_numpy(out))
            return
        host = self._rows.host(len(out))
        collect(as_numpy(host))
        out.copy_(host, non_blocking=True)
        self._synchronize()

    def ride_publish(self, group: int, q: Tensor) -> None:
        """Q of the plan's riders of a group, [riders, heads, head_dim]; K and V are stored."""
        host = self._rows.download(q)
        self._synchronize()
        self._exchange.ride_publish(group, host)
        self._tasks += self._exchange.ride_tasks(group)

    def ride_wait(self, group: int) -> bool:
        """Until the job is done that the group's last plan published. False: it is given up.

        With it whatever else is published and not done: were one late alone, others would have
        been done meanwhile.
        """
        if self._wait(
            lambda seconds: self._exchange.ride_wait(group, seconds),
            lambda: self._exchange.ride_given_up(group),
        ):
            return True
        self._exchange.ride_give_up()
        return False

    def ride_collect(self, group: int, out: Tensor) -> None:
        """O of the plan's riders into ``out``, contiguous [riders, heads, head_dim]."""
        self._collect(lambda array: self._exchange.ride_collect(group, array), out)

    def _download(self, k: Tensor, v: Tensor) -> tuple[Array, Array]:
        host = self._k.download(k), self._v.download(v)
        self._synchronize()
        return host

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
