"""All decode attention by riders: attention piggybacking without a choice (arXiv 2603.12831).

No policy of the paper, and slow by itself, but the one that has riders at every stage whatever the
load, for tests and for measuring. ``beside_gpu`` has GPU-requests for them to ride on.
"""

from __future__ import annotations

import numpy as np

from neo_server.cost_model import CostModel
from neo_server.plan import Mode, Place, Plan, Seqs, View
from neo_server.policies import mixed
from neo_server.policies.draft import Draft
from neo_server.policies.one_place import plan_in
from neo_server.policies.queue import Orders


def plan(view: View, cost: CostModel) -> Plan:
    """First come, first served in the CPU-cache; CPU decodes of one batch where nobody can ride."""
    draft = Draft(view)
    return ride(draft, plan_in(draft, Place.CPU))


def beside_gpu(view: View, cost: CostModel) -> Plan:
    """Places as in ``mixed``."""
    draft = Draft(view)
    return ride(draft, mixed.plan_places(draft))


def ride(draft: Draft, decodes: Seqs) -> Plan:
    """Those on their way and as many as can start now; the others wait their turn."""
    if Mode.PIGGYBACK not in draft.view.modes:
        draft.decode(decodes, Place.CPU)
        return draft.build()
    return draft.build(np.sort(Orders.of(draft.view, decodes).for_riders.id))
