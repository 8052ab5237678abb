"""Policies that force what a sensible one would seldom do, loaded as ``module:attribute``."""

from __future__ import annotations

import random

import numpy as np

from neo_server.cost_model import CostModel
from neo_server.plan import Mode, Place, Plan, Seqs, View
from neo_server.policies.draft import Draft
from neo_server.policies.queue import Orders

_random = random.Random(20241102)


def churn(view: View, cost: CostModel) -> Plan:
    """Places by chance; now and then a sequence is swapped out, swapped in or preempted."""
    draft = Draft(view)
    cpu_decodes = _placed(draft)
    batch = 1 if draft.has_gpu_work and _random.random() < 0.7 else 0
    draft.decode(cpu_decodes, Place.CPU, batch=batch)
    return draft.build()


def restful_churn(view: View, cost: CostModel) -> Plan:
    """As ``churn``; who is moved mostly does not advance in the same plan."""
    draft = Draft(view)
    draft.decode(_placed(draft, rest=0.8), Place.CPU)
    return draft.build()


def ride_churn(view: View, cost: CostModel) -> Plan:
    """The same with riders: now and then they stand still, or a batch takes some of them.

    Seldom enough that most tokens pass all stages.
    """
    draft = Draft(view)
    decodes = _placed(draft, rate=min(4 / max(view.ride_groups, 1), 1.0))
    chance = _random.random()
    if Mode.PIGGYBACK not in view.modes or chance < 0.8 / view.ride_groups:
        draft.decode(decodes.take(slice(_random.randint(1, max(len(decodes), 1)))), Place.CPU)
        return draft.build()
    if chance < 0.3 and draft.has_gpu_work:
        return draft.build()
    riders = Orders.of(view, decodes).for_riders
    least = max(int((riders.ride > 0).sum()), 0 if draft.has_gpu_work else min(len(riders), 1))
    return draft.build(np.sort(riders.id[: _random.randint(least, len(riders))]))


def _placed(draft: Draft, rate: float = 1.0, rest: float = 0.0) -> Seqs:
    """Everything but the CPU decodes, which it returns.

    ``rate``: of moves, per plan. ``rest``: share of plans in which those moved do not advance.
    """
    view = draft.view
    gpu, cpu = view.running.at(Place.GPU), view.running.at(Place.CPU)
    gpu, cpu = _preempt_one(draft, gpu, rate), _preempt_one(draft, cpu, rate)
    gpu, cpu = draft.grow(gpu, Place.GPU, draft.preempt), draft.grow(cpu, Place.CPU, draft.preempt)
    gpu, to_cpu = _swap_some(draft, gpu, Place.CPU, rate)
    cpu, to_gpu = _swap_some(draft, cpu, Place.GPU, rate)
    if _random.random() >= rest:
        gpu, cpu = gpu.plus(to_gpu), cpu.plus(to_cpu)
    cpu_decodes = cpu.take(cpu.is_decode)
    draft.decode(gpu.take(gpu.is_decode), Place.GPU)
    draft.tokens_left -= len(cpu_decodes)
    on_gpu = set(gpu.id.tolist())
    for seq in gpu.take(~gpu.is_decode).plus(cpu.take(~cpu.is_decode)):
        draft.prefill(seq, Place.GPU if seq.id in on_gpu else Place.CPU)
    if not draft.preempted:
        for seq in view.waiting:
            places = _random.sample((Place.GPU, Place.CPU), 2)
            if not any(draft.admit(seq, place, 0) for place in places):
                break
    draft.tokens_left += len(cpu_decodes)
    return cpu_decodes


def _preempt_one(draft: Draft, seqs: Seqs, rate: float) -> Seqs:
    if len(seqs) > 1 and _random.random() < 0.04 * rate:
        victim = _random.randrange(len(seqs))
        draft.preempt(seqs[victim])
        return seqs.take(np.arange(len(seqs)) != victim)
    return seqs


def _swap_some(draft: Draft, seqs: Seqs, to: Place, rate: float) -> tuple[Seqs, Seqs]:
    """Who stays and who moves; decodes and half-done prefills alike advance in the same plan."""
    moved = np.array(
        [_random.random() < 0.1 * rate and draft.try_swap(seq, to) for seq in seqs], dtype=bool
    )
    return seqs.take(~moved), seqs.take(moved)
