"""How many tokens of prompts an iteration takes beside its decodes (Sarathi-Serve, OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from neo_server.cost_model import CostModel, Load, iteration_time, pairs_of
from neo_server.plan import Place, Seqs
from neo_server.policies.draft import Draft

# Tokens that matrix products take at a time: a part of them costs as much. Larger iterations are
# looked at in larger steps, up to each bound; then in steps of an eighth.
_STEPS = ((512, 64), (1024, 128))
_LARGE_STEP = 256
_SPARE = 1.25  # prefill beyond the mean demand, since it comes in bursts
# A crowd on the CPU counts for this much of what it would decode: it is long until it has earned
# its prompts. A guess between two machines (docs/decisions.md).
_CROWD = 0.1


def chunk_limit(
    draft: Draft,
    cost: CostModel,
    base: Load,
    started: Seqs,
    more: float = 0.0,
    cpu_prompt: int = 0,
) -> int:
    """Tokens of batch-0, the decodes of ``base`` included. ``started``: prompts in the making.

    Those with which a prompt token costs least, or more where prompts are long against outputs: as
    many as keep the caches full of decodes, by the lengths seen lately. Targets change it.
    ``more``: tokens that requests would decode on the CPU if their prompts were there.
    ``cpu_prompt``: tokens of the prompt that comes first, where it goes to the CPU-cache.
    """
    view = draft.view
    most = view.max_num_batched_tokens
    if not (view.enable_chunked_prefill and (len(started) or view.waiting)):
        return most
    least = int(base.tokens) + 1  # some prefill always advances
    awaited = _awaited(draft, started) + _CROWD * more
    # Where somebody rides, products take all places of riders beside the batch.
    places = int(cost.ride_places) if (view.running.ride > 0).any() else 0
    if base.tokens + places >= most:
        places = 0  # no step holds both
    beside = replace(base, tokens=base.tokens + places)
    limit = max(cheapest(cost, beside, most, awaited, cpu_prompt) - places, least)
    if view.mean_output:
        holds = view.gpu_blocks_total * view.block_size
        rows = holds / (view.mean_prompt + view.mean_output / 2) + view.cpu_decodes
        demand = min(rows, draft.seats) * view.mean_prompt / view.mean_output
        limit = max(limit, _whole(int(beside.tokens + _SPARE * demand), most) - places)
    if view.first_token_due is not None:
        limit = _hurried(draft, cost, base, limit, started)
    if view.tpot_slo_s is None:
        return limit
    if cpu_prompt and len(started):
        beside = replace(beside, staged=beside.staged + int(started.num_computed[0]))
    low, high = least, limit
    while low < high:
        middle = (low + high + 1) // 2
        grown = beside.with_prefill(middle - int(base.tokens), 0, moved=False, last=False)
        if iteration_time(cost, [grown]) <= view.tpot_slo_s:
            low = middle
        else:
            high = middle - 1
    return low


def cheapest(cost: CostModel, base: Load, most: int, awaited: float, cpu_prompt: int = 0) -> int:
    """Tokens of an iteration, ``base`` included, with which a prompt token costs least.

    It costs the time that the chunk adds to the iteration, and what the sequences that wait for
    prompts (``awaited``) would have decoded in it: of the decodes' time their share of all rows. So
    chunks are large while caches fill, and small where each finished sequence is replaced by one.
    Prompts of ``cpu_prompt`` tokens go to the CPU-cache: unless an iteration takes whole ones, it
    fetches what was there of the one before.
    """
    before = int(base.tokens)
    alone = iteration_time(cost, [base]) if before else 0.0
    linear = cost.linear(before) if before else 0.0
    # By layer, as what a chunk adds: other stages take what they take without it.
    missed = alone * awaited / (base.gpu_rows + awaited) / cost.num_layers
    least, chosen = float("inf"), most
    for tokens, n_new, fetched in _offers(cost, before, most, cpu_prompt):
        pairs = n_new * cpu_prompt / 2 if cpu_prompt else pairs_of(n_new, 0)
        added = cost.linear(before + n_new) - linear + cost.prefill_attn(pairs) + fetched
        if cpu_prompt:
            added += cost.storing(n_new)
        price = (added + missed) / n_new
        if price <= least:
            least, chosen = price, tokens
    return chosen


def _offers(
    cost: CostModel, before: int, most: int, cpu_prompt: int
) -> Iterator[tuple[int, int, float]]:
    """Sizes to look at, the prompt tokens in them, and a layer's seconds for what they fetch.

    Where prompts are cut one is in each iteration, and half of it is there already, on average.
    """
    fetched, most_whole = cost.staging(cpu_prompt / 2) if cpu_prompt else 0.0, 0
    for tokens in _sizes(before, most):
        n_new = tokens - before
        whole = n_new // cpu_prompt * cpu_prompt if cpu_prompt else 0
        if not whole:
            yield tokens, n_new, fetched
        elif whole > most_whole:
            yield tokens, whole, 0.0
            most_whole = whole


def _sizes(above: int, most: int) -> Iterator[int]:
    size = 0
    while size < most:
        larger = max(_LARGE_STEP, size // 8 // _LARGE_STEP * _LARGE_STEP)
        size += next((step for bound, step in _STEPS if size < bound), larger)
        if size > above:
            yield min(size, most)


def _whole(tokens: int, most: int) -> int:
    """As many, in whole tiles."""
    return next(_sizes(tokens - 1, most), most)


def _awaited(draft: Draft, started: Seqs) -> int:
    """Sequences that could decode in the GPU-cache now if their prompts were there; at least 1."""
    view = draft.view
    count = int((started.place == Place.GPU).sum())
    if view.waiting:
        need = max(view.need(view.waiting[0], Place.GPU), 1)
        room = min(draft.free[Place.GPU] // need, draft.seats_left)
        count += min(int(room), len(view.waiting))
    return max(count, 1)


def _hurried(draft: Draft, cost: CostModel, base: Load, limit: int, started: Seqs) -> int:
    """The least chunks with which the earliest request that is not late gets its token in time.

    ``limit`` where no size does, or where it waits for room in the GPU-cache: it gains nothing.
    """
    view, room = draft.view, draft.free[Place.GPU]
    assert view.first_token_due is not None
    due_id, due_s = view.first_token_due
    most = view.max_num_batched_tokens

    def seconds(tokens: int, size: int) -> float:
        n_new = max(min(size - int(base.tokens), tokens), 1)
        chunk = base.with_prefill(n_new, 0, moved=False, last=True)
        return -(-tokens // n_new) * iteration_time(cost, [chunk])

    tokens = int(started.take(started.id <= due_id).remaining.sum())
    for seq in view.waiting:
        if seq.id > due_id:
            break
        room -= view.need(seq, Place.GPU)
        if room < 0 or seconds(tokens, most) > due_s:
            return limit
        tokens += seq.remaining
    size = limit
    while size < most and seconds(tokens, size) > due_s:
        size = min(2 * size, most)
    return size if seconds(tokens, size) <= due_s else limit
