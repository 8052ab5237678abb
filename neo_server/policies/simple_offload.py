"""All decode attention on the CPU, one batch, no overlap.

The first strawman of arXiv 2411.01142, section 3.1.
"""

from __future__ import annotations

from neo_server.cost_model import CostModel
from neo_server.plan import Place, Plan, View
from neo_server.policies.draft import Draft
from neo_server.policies.one_place import plan_in


def plan(view: View, cost: CostModel) -> Plan:
    """First come, first served; out of CPU pages, the latest arrival is recomputed later."""
    draft = Draft(view)
    decodes = plan_in(draft, Place.CPU)
    draft.decode(decodes, Place.CPU)
    return draft.build()
