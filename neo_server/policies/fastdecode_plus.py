"""The asymmetric pipeline with *all* decode attention on the CPU.

The baseline FastDecode+ of arXiv 2411.01142, section 6 (figure 8).
"""

from __future__ import annotations

import numpy as np

from neo_server.cost_model import CostModel, Load
from neo_server.plan import Place, Plan, Seqs, View
from neo_server.policies.draft import Draft
from neo_server.policies.one_place import plan_in


def plan(view: View, cost: CostModel) -> Plan:
    """Prefills in batch-0; decodes in batch-1 while T_ca1 <= T_l0, the rest in batch-0."""
    draft = Draft(view)
    before = draft.tokens_left
    decodes = plan_in(draft, Place.CPU)
    second = _hidden(decodes, before - draft.tokens_left, cost)
    if not draft.has_gpu_work and second == len(decodes):
        second = len(decodes) // 2
    first = len(decodes) - second
    draft.decode(decodes.take(slice(first)), Place.CPU)
    draft.decode(decodes.take(slice(first, None)), Place.CPU, batch=1 if draft.has_gpu_work else 0)
    return draft.build()


def _hidden(decodes: Seqs, prefill_tokens: int, cost: CostModel) -> int:
    """How many decodes, from the latest, batch-1 takes: what is left makes batch-0 longer."""
    tokens = np.cumsum(decodes.num_tokens[::-1])
    best = 0
    low, high = 0, len(decodes)
    while low <= high:
        middle = (low + high) // 2
        load = Load(tokens=prefill_tokens + len(decodes) - middle)
        t_ca1 = cost.cpu_attn(middle, float(tokens[middle - 1])) if middle else 0.0
        if t_ca1 <= cost.linear(load.tokens):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
