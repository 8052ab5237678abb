"""What the policies with a single cache share."""

from __future__ import annotations

from neo_server.plan import Place, Seqs
from neo_server.policies.draft import Draft


def plan_in(draft: Draft, place: Place) -> Seqs:
    """First come, first served in one cache, prefills in batch-0.

    Returns the decodes, for which room and budget are set aside; the caller places them. Out of
    room, the latest arrival is recomputed later.
    """
    view = draft.view
    kept = draft.grow(view.running, place, draft.preempt)
    is_decode = kept.is_decode
    decodes = kept.take(is_decode)
    draft.tokens_left -= len(decodes)
    for seq in kept.take(~is_decode):
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
    draft.tokens_left += len(decodes)
    return decodes
