"""Triton kernels of the hand-off to the cpu workers, through registered shared memory.

Epochs come from device memory, so that a captured graph serves every plan. Host words get only
release stores and acquire loads of system scope; read-modify-writes stay in device memory.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_release(address, value):
    """A word of shared memory, behind all that this program has stored or seen stored."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [address.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_acquire(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u64 $0, [$1];",
        "=l,l",
        [address.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _now_ns(like):
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [like], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["layer"])
def publish_kernel(first_epoch, published, layer):
    """After everything that the job needs, in stream order: the epoch, by a release store."""
    first = tl.load(first_epoch)
    if first != 0:
        store_release(published, first + layer)


@triton.jit(do_not_specialize=["layer"])
def wait_kernel(first_epoch, done, abort, voided, waited_ns, layer, limit_ns):
    """Until ``done`` or ``abort`` reaches the epoch; not done: the channel is void.

    A void channel waits no more. ``limit_ns`` is a backstop behind the host's watchdog, which
    stores ``abort``: no wait on the device is without an end.
    """
    first = tl.load(first_epoch)
    if first != 0:
        epoch = first + layer
        begin = _now_ns(epoch)
        now = begin
        reached = _load_acquire(done)
        given_up = tl.where(tl.load(voided) != 0, epoch, _load_acquire(abort))
        while (reached < epoch) & (given_up < epoch) & (now - begin < limit_ns):
            reached = _load_acquire(done)
            given_up = _load_acquire(abort)
            now = _now_ns(reached)
        if reached < epoch:
            tl.store(voided, 1)
        tl.store(waited_ns, tl.load(waited_ns) + now - begin)


@triton.jit
def merge_head(
    words, areas, out, epoch, first_task, n_splits, h, area_floats, worker_area_floats,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    EPOCH_SHIFT: tl.constexpr, WORKER_SHIFT: tl.constexpr, FIELD_MASK: tl.constexpr,
):  # fmt: skip
    """O of KV head ``h`` of one row: the splits' areas, which the task words name, merged."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    here = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    for split in range(0, n_splits):
        index = (first_task + h * n_splits + split).to(tl.int64)
        word = tl.load(words + index)
        if (word >> EPOCH_SHIFT) == epoch:
            worker = (word >> WORKER_SHIFT) & FIELD_MASK
            area = areas + worker * worker_area_floats + index * area_floats
            m = tl.load(area + GROUP * HEAD_DIM + g, mask=g < GROUP, other=float("-inf"))
            mass = tl.load(area + GROUP * HEAD_DIM + GROUP + g, mask=g < GROUP, other=0.0)
            o = tl.load(area + g[:, None] * HEAD_DIM + d[None, :], mask=here, other=0.0)
            higher = tl.maximum(top, m)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(top - base)
            weight = tl.exp(m - base)
            acc = acc * shrink[:, None] + o * weight[:, None]
            total = total * shrink + mass * weight
            top = higher
    total = tl.where(total == 0.0, 1.0, total)  # zeros where a job was given up
    to = out + (h * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["layer"])
def collect_kernel(
    first_epoch, row_count, row_tokens, row_tasks, words, areas, out, layer,
    area_floats, worker_area_floats,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    EPOCH_SHIFT: tl.constexpr, WORKER_SHIFT: tl.constexpr, FIELD_MASK: tl.constexpr,
):  # fmt: skip
    """O of one row and KV head: the splits' areas, which the task words name, merged."""
    r, h = tl.program_id(0), tl.program_id(1)
    if r < tl.load(row_count):
        epoch = tl.load(first_epoch) + layer
        task = tl.load(row_tasks + r * 2)
        n_splits = tl.load(row_tasks + r * 2 + 1)
        token = tl.load(row_tokens + r).to(tl.int64)
        # Words are loaded plainly: the wait's acquire, a kernel before, orders them.
        merge_head(
            words, areas, out + token * HEADS * HEAD_DIM, epoch, task, n_splits, h,
            area_floats, worker_area_floats,
            GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, EPOCH_SHIFT, WORKER_SHIFT, FIELD_MASK,
        )  # fmt: skip
