"""The one Triton kernel of riders: a group leaves its stage, and the next stage's group arrives.

Between the linear stages s and s + 1, for the group at s: RoPE, K and V into the CPU-cache, Q to
the cpu workers, the residual kept, the job published. For the group at s + 1: its residual, and O
of layer s, for which it waits. The two have nothing of each other, so that their programs run in
any order.

One warp a program. A word of the host is read by one lane (each lane reads for itself otherwise) of
one program: as many reads of one word are served one after the other, a microsecond each. The
other programs wait for that one, which comes before them in the grid.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.cuda.elementwise import rotate, store_for_cpu
from gpu_worker.cuda.handoff import merge_head, store_release

# ``value`` of lane 0 to all lanes; the barrier orders what they do behind what lane 0 has acquired.
_FROM_LANE_0 = """
    mov.b64 {low, high}, value;
    shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;
    shfl.sync.idx.b32 high, high, 0, 31, 0xffffffff;
    mov.b64 $0, {low, high};
    bar.warp.sync 0xffffffff;
}"""
_LANE_0 = """{
    .reg .pred first;
    .reg .b32 lane, low, high;
    .reg .b64 value;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b64 value, 0;"""
_LOAD_ACQUIRE = tl.constexpr(
    f"{_LANE_0}\n    @first ld.acquire.sys.global.u64 value, [$1];{_FROM_LANE_0}"
)
_LOAD_FLAG = tl.constexpr(
    f"{_LANE_0}\n    @first ld.acquire.gpu.global.u64 value, [$1];{_FROM_LANE_0}"
)
_NOW = tl.constexpr(f"{_LANE_0}\n    @first mov.u64 value, %globaltimer;{_FROM_LANE_0}")


@triton.jit
def load_acquire(address):
    """A word of shared memory, read by one lane of the program's only warp."""
    return tl.inline_asm_elementwise(
        _LOAD_ACQUIRE, "=l,l", [address.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def load_flag(address):
    """The same of a word of device memory."""
    return tl.inline_asm_elementwise(
        _LOAD_FLAG, "=l,l", [address.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def store_flag(address, value):
    """A word of device memory, behind all that this program has seen stored."""
    tl.inline_asm_elementwise(
        "st.release.gpu.global.u64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [address.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def now_ns(like):
    """The same for all lanes."""
    return tl.inline_asm_elementwise(_NOW, "=l,l", [like], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def pause(like):
    """A fifth of a microsecond or so, in which others get at the word that is waited for."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 200; mov.b64 $0, $1;",
        "=l,l",
        [like],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _watch(job, done, abort, voided, waited_ns, limit_ns):
    """As ``handoff.wait_kernel``."""
    reached = load_acquire(done)
    if reached < job:
        begin = now_ns(job)
        now = begin
        given_up = load_acquire(abort)
        while (reached < job) & (given_up < job) & (now - begin < limit_ns):
            pause(reached)
            given_up = load_acquire(abort)
            reached = load_acquire(done)
            now = now_ns(reached)
        if reached < job:
            tl.store(voided, 1)
        tl.store(waited_ns, tl.load(waited_ns) + now - begin)


@triton.jit
def _wait(job, done, abort, joined, voided, waited_ns, limit_ns, watches):
    """One program ``watches`` the host's words; the others wait for its flag, ``joined``."""
    if watches:
        _watch(job, done, abort, voided, waited_ns, limit_ns)
        store_flag(joined, job)
    else:
        while load_flag(joined) < job:
            pause(job)


@triton.jit
def _leave(
    stage, r, part, n, publishes, arrived, positions, pages, page_rows, store_rows,
    qkv, rope, tiles, scales, exchange_q, n_pages, tile_stride, scale_stride, published,
    PLACES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, PART: tl.constexpr, ROPE_PARTS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """PART heads of one of ``n`` riders; the last of all these programs publishes the job."""
    at_place = stage * PLACES + r
    heads = part * PART + tl.arange(0, PART)
    d = tl.arange(0, HALF)
    there = (heads < HEADS + 2 * KV_HEADS)[:, None] & (d < HEAD_DIM // 2)[None, :]
    row = qkv + r.to(tl.int64) * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    turn = rope + tl.load(positions + at_place).to(tl.int64) * HEAD_DIM
    rotated = (heads < HEADS + KV_HEADS)[:, None]
    at = row + heads[:, None] * HEAD_DIM + d[None, :]
    first, second = rotate(at, turn, d, there, rotated, HEAD_DIM)
    store_for_cpu(
        first, second, heads, d, there, tl.load(pages + at_place).to(tl.int64),
        tl.load(page_rows + at_place).to(tl.int64), tl.load(store_rows + at_place).to(tl.int64),
        tiles, scales, exchange_q, stage, n_pages, tile_stride, scale_stride,
        HEADS, KV_HEADS, HEAD_DIM, INT8,
    )  # fmt: skip
    tl.debug_barrier()  # all lanes' stores before the lane that counts
    before = tl.atomic_add(arrived + stage, 1, sem="acq_rel", scope="sys")
    if before == n * ROPE_PARTS - 1:
        tl.store(arrived + stage, 0)  # for the next plan
        store_release(published, tl.load(publishes + stage))


@triton.jit(do_not_specialize=["stage"])
def ride_kernel(
    stage, publishes, collects, groups, counts, positions, pages, page_rows, store_rows, tasks,
    arrived, qkv, rope, tiles, scales, exchange_q, n_pages, tile_stride, scale_stride, published,
    residual, store, done, abort, joined, voided, waited_ns, limit_ns,
    words, areas, attn, group_tasks, area_floats, worker_area_floats,
    PLACES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, PART: tl.constexpr, ROPE_PARTS: tl.constexpr, INT8: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROW_PARTS: tl.constexpr, DONE_WORDS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
    EPOCH_SHIFT: tl.constexpr, WORKER_SHIFT: tl.constexpr, FIELD_MASK: tl.constexpr,
):  # fmt: skip
    """For each place: ROPE_PARTS programs of ``_leave``, ROW_PARTS of the residual, KV_HEADS of O.

    In this order, so that nothing that leaves has to find room beside programs that wait, nor the
    one that they wait for. Fields are as ``RideLayout`` has them, with PLACES places a stage;
    ``arrived``: zeros, [stages]; ``joined``: the job last waited for, [stages].
    """
    r, part = tl.program_id(0), tl.program_id(1)
    n_leave = tl.load(counts + stage)
    job = tl.load(collects + stage + 1)
    n_join = tl.where(job != 0, tl.load(counts + stage + 1), 0)
    if part < ROPE_PARTS:
        if r < n_leave:
            _leave(
                stage, r, part, n_leave, publishes, arrived, positions, pages, page_rows,
                store_rows, qkv, rope, tiles, scales, exchange_q,
                n_pages, tile_stride, scale_stride, published,
                PLACES, HEADS, KV_HEADS, HEAD_DIM, HALF, PART, ROPE_PARTS, INT8,
            )  # fmt: skip
    elif part < ROPE_PARTS + ROW_PARTS:
        at = (part - ROPE_PARTS) * BLOCK + tl.arange(0, BLOCK)
        mine = residual + r.to(tl.int64) * HIDDEN + at
        leaves = at < tl.where(r < n_leave, HIDDEN, 0)
        joins = at < tl.where(r < n_join, HIDDEN, 0)
        rows = store_rows + stage * PLACES + r
        to = tl.load(rows).to(tl.int64) * HIDDEN + at
        of = tl.load(rows + PLACES).to(tl.int64) * HIDDEN + at
        kept = tl.load(mine, mask=leaves, other=0.0)
        next_one = tl.load(store + of, mask=joins, other=0.0)
        tl.debug_barrier()  # all is read before the row is another's
        tl.store(store + to, kept, mask=leaves)
        tl.store(mine, next_one, mask=joins)
    elif r < n_join:
        h = part - ROPE_PARTS - ROW_PARTS
        group = tl.load(groups + stage + 1).to(tl.int64)
        _wait(
            job, done + group * DONE_WORDS, abort, joined + stage, voided + stage + 1, waited_ns,
            limit_ns, (r == 0) & (h == 0),
        )  # fmt: skip
        task = tasks + ((stage + 1) * PLACES + r) * 2
        merge_head(
            words + group * group_tasks, areas + group * group_tasks * area_floats,
            attn + r.to(tl.int64) * HEADS * HEAD_DIM, job, tl.load(task), tl.load(task + 1), h,
            area_floats, worker_area_floats,
            GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, EPOCH_SHIFT, WORKER_SHIFT, FIELD_MASK,
        )  # fmt: skip
