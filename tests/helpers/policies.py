"""A policy that forces what a sensible one would seldom do, loaded as ``module:attribute``."""

from __future__ import annotations

import random

from neo_server.plan import Place, Plan, SeqView, View
from neo_server.policies.draft import Draft

_random = random.Random(20241102)


def churn(view: View) -> Plan:
    """Places by chance; now and then a sequence is swapped out, swapped in or preempted."""
    draft = Draft(view)
    gpu = [seq for seq in view.running if seq.place is Place.GPU]
    cpu = [seq for seq in view.running if seq.place is Place.CPU]
    _preempt_one(draft, gpu, cpu)
    gpu, cpu = draft.grow(gpu, Place.GPU, draft.preempt), draft.grow(cpu, Place.CPU, draft.preempt)
    gpu, cpu = _swap_some(draft, gpu, cpu)
    cpu_decodes = [seq for seq in cpu if seq.is_decode]
    draft.decode([seq for seq in gpu if seq.is_decode], Place.GPU)
    draft.tokens_left -= len(cpu_decodes)
    for seq in sorted(gpu + cpu):
        if not seq.is_decode:
            draft.prefill(seq, Place.GPU if seq in gpu else Place.CPU)
    if not draft.preempted:
        for seq in view.waiting:
            places = _random.sample((Place.GPU, Place.CPU), 2)
            if not any(draft.admit(seq, place, 0) for place in places):
                break
    draft.tokens_left += len(cpu_decodes)
    batch = 1 if draft.has_gpu_work and _random.random() < 0.7 else 0
    draft.decode(cpu_decodes, Place.CPU, batch=batch)
    return draft.build()


def _preempt_one(draft: Draft, gpu: list[SeqView], cpu: list[SeqView]) -> None:
    for seqs in (gpu, cpu):
        if len(seqs) > 1 and _random.random() < 0.04:
            draft.preempt(seqs.pop(_random.randrange(len(seqs))))


def _swap_some(
    draft: Draft, gpu: list[SeqView], cpu: list[SeqView]
) -> tuple[list[SeqView], list[SeqView]]:
    """Moves decodes and half-done prefills alike; they advance in the same plan."""
    stay_gpu, stay_cpu, to_cpu, to_gpu = [], [], [], []
    for seqs, stay, moved, to in (
        (gpu, stay_gpu, to_cpu, Place.CPU),
        (cpu, stay_cpu, to_gpu, Place.GPU),
    ):
        for seq in seqs:
            wanted = _random.random() < 0.1 and draft.try_swap(seq, to)
            (moved if wanted else stay).append(seq)
    return stay_gpu + to_gpu, stay_cpu + to_cpu
