"""What a plan takes, summed up from its rows: to check a policy's own estimate by."""

from __future__ import annotations

from neo_native import RowKind
from neo_server.cost_model import CostModel, Load, Ride, iteration_time
from neo_server.plan import Plan, Rows, Seqs, View


def load_of(rows: Rows, seqs: Seqs) -> Load:
    """Sums of a sub-batch; ``seqs`` are its rows' sequences in their order."""
    decode = rows.kind >= RowKind.DECODE_GPU
    on_gpu, on_cpu = rows.kind == RowKind.DECODE_GPU, rows.kind == RowKind.DECODE_CPU
    new, start = rows.n_new[~decode], seqs.num_computed[~decode]
    to_cpu = rows.kind == RowKind.PREFILL_CPU
    return Load(
        tokens=int(rows.n_new.sum()),
        pairs=float((new * (start + (new + 1) / 2)).sum()),
        gpu_rows=int(on_gpu.sum()),
        gpu_tokens=int(seqs.num_tokens[on_gpu].sum()),
        cpu_rows=int(on_cpu.sum()),
        cpu_tokens=int(seqs.num_tokens[on_cpu].sum()),
        moved=int(rows.n_new[to_cpu].sum()),
        sampled=int((seqs.num_computed + rows.n_new == seqs.num_tokens).sum()),
        staged=int(seqs.num_computed[to_cpu].sum()),
        stored=int(rows.n_new[to_cpu].sum()),
    )


def plan_time(cost: CostModel, plan: Plan, view: View) -> float:
    """Seconds that a whole plan takes. A plan without rows takes the time of its swaps."""
    known = {seq.id: seq for seq in view.running}
    missing = {int(i) for batch in plan.batches for i in batch.seq} - known.keys()
    for seq in view.waiting:
        if not missing:
            break
        if seq.id in missing:
            known[seq.id] = seq
            missing.discard(seq.id)
    loads = [load_of(b, Seqs.of(known[i] for i in b.seq.tolist())) for b in plan.batches]
    if not loads:
        loads = [Load()]
    named = {int(i) for ids in (*(b.seq for b in plan.batches), plan.riders) for i in ids}
    for seq_id in plan.swap_out + plan.swap_in:
        if seq_id in named:
            loads[0].awaited += known[seq_id].num_computed
        else:
            loads[0].moved += known[seq_id].num_computed
    riders = Seqs.of(known[i] for i in plan.riders.tolist())
    tokens, groups = int(riders.num_tokens.sum()), max(view.ride_groups, 2)
    ride = Ride.spread(len(riders), tokens, groups, view.ride_capacity)
    return iteration_time(cost, loads, ride)
