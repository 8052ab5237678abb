"""Decodes in two equal halves, all attention on the CPU: FastDecode's pipeline.

The second strawman of arXiv 2411.01142, section 3.1 (FastDecode: arXiv 2403.11421).
"""

from __future__ import annotations

import numpy as np

from neo_server.cost_model import CostModel
from neo_server.plan import Place, Plan, View
from neo_server.policies.draft import Draft
from neo_server.policies.one_place import plan_in


def plan(view: View, cost: CostModel) -> Plan:
    """Halves by tokens of K and V, so that either sub-batch keeps the CPU busy as long."""
    draft = Draft(view)
    decodes = plan_in(draft, Place.CPU)
    tokens = np.cumsum(decodes.num_tokens)
    half = int(np.searchsorted(tokens, tokens[-1] / 2, "right")) if len(tokens) else 0
    first = max(half, 1) if len(decodes) == 1 or not draft.has_gpu_work else half
    draft.decode(decodes.take(slice(first)), Place.CPU)
    draft.decode(decodes.take(slice(first, None)), Place.CPU, batch=1 if draft.has_gpu_work else 0)
    return draft.build()
