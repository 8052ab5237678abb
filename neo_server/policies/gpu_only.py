"""No offload, the baseline of arXiv 2411.01142, section 5.

Iteration-level scheduling with selective batching (Orca, OSDI 2022) and chunked prefills beside
decodes (Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from neo_server.cost_model import CostModel
from neo_server.plan import Place, Plan, View
from neo_server.policies.draft import Draft
from neo_server.policies.one_place import plan_in


def plan(view: View, cost: CostModel) -> Plan:
    """First come, first served; out of GPU blocks, the latest arrival is recomputed later."""
    draft = Draft(view)
    decodes = plan_in(draft, Place.GPU, cost)
    draft.decode(decodes, Place.GPU)
    return draft.build()
