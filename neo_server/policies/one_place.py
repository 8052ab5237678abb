"""What the policies with a single cache share."""

from __future__ import annotations

from neo_server.cost_model import CostModel
from neo_server.plan import Place, Seqs
from neo_server.policies.chunks import chunk_limit
from neo_server.policies.draft import Draft, decode_load


def plan_in(draft: Draft, place: Place, cost: CostModel | None = None) -> Seqs:
    """First come, first served in one cache, prefills in batch-0; ``cost``: sizes their chunks.

    Returns the decodes, for which room and budget are set aside; the caller places them. Out of
    room, the latest arrival is recomputed later.
    """
    view = draft.view
    kept = draft.grow(view.running, place, draft.preempt)
    is_decode = kept.is_decode
    decodes = kept.take(is_decode)
    started, left = kept.take(~is_decode), draft.tokens_left
    if cost is not None:
        draft.tokens_left = chunk_limit(draft, cost, decode_load(decodes, place), started)
    held_back = left - draft.tokens_left
    draft.tokens_left -= len(decodes)
    for seq in started:
        draft.prefill(seq, place)
    if not draft.preempted:
        size = view.block_size if place is Place.GPU else view.page_size
        # What decodes take per iteration; nothing is held back for an idle machine.
        reserve = -(-len(decodes) // size)
        busy = len(kept) > 0
        for seq in view.waiting:
            if not draft.admit(seq, place, reserve if busy else 0):
                break
            busy = True
    draft.tokens_left += len(decodes) + held_back
    return decodes
