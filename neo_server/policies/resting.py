"""Who sits out a plan that moves sequences, so that the plan need not wait for the copies.

An iteration waits for the copies of its sequences and for those of blocks that it stores into
(``gpu_worker/cuda/copies.py``); any other copy runs beside it.
"""

from __future__ import annotations

import numpy as np

from neo_server.cost_model import CostModel, iteration_time
from neo_server.plan import Place, Seqs, SeqView
from neo_server.policies.candidates import Worth
from neo_server.policies.draft import Draft, decode_load


def rest(draft: Draft, cost: CostModel, gpu: Seqs, cpu: Seqs) -> tuple[Seqs, Seqs, float]:
    """Those of either place that may advance, and the tokens whose copies have to be waited for.

    ``gpu``, ``cpu``: where they are after the moves. Waiting for a copy costs the whole iteration
    its time, resting costs a token. Somebody on the GPU always advances.
    """
    moved = np.array(draft.swap_in + draft.swap_out, np.int64)
    if not len(moved):
        return gpu, cpu, 0.0
    comes, goes = gpu.take(np.isin(gpu.id, moved)), cpu.take(np.isin(cpu.id, moved))
    if not cost.overlaps_transfers:
        return gpu, cpu, float(comes.num_computed.sum() + goes.num_computed.sum())
    decodes = gpu.take(gpu.is_decode)
    load = decode_load(decodes, Place.GPU)
    token = Worth.of(cost, load, draft.view).token
    others = decodes.take(~np.isin(decodes.id, moved))
    resting = _of_arrivals(draft, cost, comes, token, iteration_time(cost, [load]))
    resting += _of_departures(draft, cost, others, goes, token)
    if np.isin(others.id, resting).all():
        resting = []
    gpu, cpu = gpu.take(~np.isin(gpu.id, resting)), cpu.take(~np.isin(cpu.id, resting))
    return gpu, cpu, _awaited(comes, goes, resting)


def _of_arrivals(
    draft: Draft, cost: CostModel, comes: Seqs, token: float, hidden: float
) -> list[int]:
    """``hidden``: the copy of whom the last plan left out runs beside that plan for so long."""
    resting = []
    for seq in comes:
        seconds = cost.num_layers * cost.transfer(seq.num_computed)
        if seq.skipped and seconds <= hidden:
            hidden -= seconds
        elif seq.is_decode and seconds > token and seq.skipped < draft.view.max_skipped - 1:
            resting.append(seq.id)
    return resting


def _of_departures(
    draft: Draft, cost: CostModel, others: Seqs, goes: Seqs, token: float
) -> list[int]:
    """All that go, and those for whose growth there is no room but theirs; or nobody."""
    if not goes.is_decode.all():
        return []
    grows = draft.view.need(others, Place.GPU) > others.held
    late = others.id[grows][draft.view.gpu_blocks_free :].tolist()
    seconds = cost.num_layers * cost.transfer(float(goes.num_computed.sum()))
    return [*goes.id.tolist(), *late] if seconds > token * (len(goes) + len(late)) else []


def _awaited(comes: Seqs, goes: Seqs, resting: list[int]) -> float:
    """Whom the last plan left out is not counted: its copy began earlier."""
    return float(sum(_counts(seq, resting) * seq.num_computed for seq in comes.plus(goes)))


def _counts(seq: SeqView, resting: list[int]) -> bool:
    left_out = seq.place is Place.CPU and seq.skipped > 0
    return not left_out and seq.id not in resting
