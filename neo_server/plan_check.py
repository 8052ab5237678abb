"""Whether a plan can be carried out as it stands: no policy is trusted."""

from __future__ import annotations

import numpy as np

from neo_native import RowKind
from neo_server.errors import PlanError
from neo_server.plan import Ints, Mode, Place, Plan, Rows, Seqs, SeqView, View

_NONE = Seqs.of(())


def check_plan(plan: Plan, view: View) -> None:
    """Raises ``PlanError`` that names the value and the limit."""
    if len(plan.batches) > 2 or (len(plan.batches) == 2 and not all(map(len, plan.batches))):
        raise PlanError(f"sub-batches have {[len(b) for b in plan.batches]} rows; 2 filled at most")
    if plan.mode not in view.modes | {Mode.ONE_BATCH}:  # which any worker runs
        raise PlanError(f"plan is of mode {plan.mode}; the worker runs {sorted(view.modes)}")
    rows = _joined(plan.batches)
    if not _distinct(np.concatenate((rows.seq, plan.riders)) if len(plan.riders) else rows.seq):
        raise PlanError("a sequence has two rows in one plan")
    moves = _check_moves(plan, view)
    seqs, admitted = _sequences(rows, view, plan)
    place = _places_after(seqs, plan)
    _check_rows(rows, seqs, place, view)
    riders = _riders(plan, view)
    _check_groups(plan, riders, view)
    _check_budgets(plan, rows, seqs, riders, moves, admitted, view)


def _joined(batches: tuple[Rows, ...]) -> Rows:
    if len(batches) == 1:
        return batches[0]
    columns = [
        [getattr(b, name) for b in batches] or [np.empty(0, np.int64)]
        for name in ("seq", "kind", "n_new")
    ]
    return Rows(*(np.concatenate(column) for column in columns))


def _distinct(ids: Ints) -> bool:
    """No id is there twice."""
    ordered = np.sort(ids)
    return not (ordered[1:] == ordered[:-1]).any()


def _find(ids: Ints, among: Ints) -> Ints:
    """Index of each id, or -1. ``among`` is sorted."""
    if not len(among):
        return np.full(len(ids), -1)
    at = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return np.where(among[at] == ids, at, -1)


def _check_moves(plan: Plan, view: View) -> dict[str, Seqs]:
    found = {}
    for name, ids, place in (
        ("preempt", plan.preempt, None),
        ("swap_out", plan.swap_out, Place.GPU),
        ("swap_in", plan.swap_in, Place.CPU),
    ):
        if not ids:
            found[name] = _NONE
            continue
        at = _find(np.array(ids, np.int64), view.running.id)
        for seq_id in np.array(ids, np.int64)[at < 0].tolist():
            raise PlanError(f"{name} names sequence {seq_id}, which is not running there")
        found[name] = view.running.take(at)
        for seq in found[name]:
            if place is not None and seq.place is not place:
                raise PlanError(f"{name} names sequence {seq.id}, which is not running there")
    moves = plan.preempt + plan.swap_out + plan.swap_in
    if len(set(moves)) != len(moves):
        raise PlanError("a sequence is moved twice in one plan")
    if len(plan.swap_out) + len(plan.swap_in) > view.max_swaps:
        raise PlanError(f"more than max_swaps, {view.max_swaps}, swaps")
    return found


def _sequences(rows: Rows, view: View, plan: Plan) -> tuple[Seqs, int]:
    """The rows' sequences, in their order, and how many of them were waiting."""
    at = _find(rows.seq, view.running.id)
    if plan.preempt:
        for seq_id in np.intersect1d(rows.seq, np.array(plan.preempt, np.int64)).tolist():
            raise PlanError(f"row names sequence {seq_id}, which is unknown or preempted")
    outside = np.flatnonzero(at < 0)
    if not len(outside):
        return view.running.take(at), 0
    waiting = _waiting(set(rows.seq[outside].tolist()), view)
    added = Seqs.of(waiting[seq_id] for seq_id in rows.seq[outside].tolist())
    columns = []
    for name in SeqView._fields:
        column = np.empty(len(rows), np.int64)
        column[at >= 0] = getattr(view.running, name)[at[at >= 0]]
        column[outside] = getattr(added, name)
        columns.append(column)
    return Seqs(*columns), len(outside)


def _waiting(ids: set[int], view: View) -> dict[int, SeqView]:
    found: dict[int, SeqView] = {}
    for seq in view.waiting:
        if len(found) == len(ids):
            break
        if seq.id in ids:
            found[seq.id] = seq
    for seq_id in ids - found.keys():
        raise PlanError(f"row names sequence {seq_id}, which is unknown or preempted")
    return found


def _places_after(seqs: Seqs, plan: Plan) -> Ints:
    place = seqs.place.copy()
    for ids, there in ((plan.swap_out, Place.CPU), (plan.swap_in, Place.GPU)):
        if ids:
            place[np.isin(seqs.id, ids)] = there
    return place


def _check_rows(rows: Rows, seqs: Seqs, place: Ints, view: View) -> None:
    kind_place = np.where(rows.kind % 2 == 1, int(Place.CPU), int(Place.GPU))
    for i in np.flatnonzero((place != Place.NOWHERE) & (place != kind_place)).tolist():
        kind, name = RowKind(int(rows.kind[i])).name, Place(int(place[i])).name
        raise PlanError(f"{kind} row for sequence {rows.seq[i]}, whose cache is {name}")
    for i in np.flatnonzero((rows.kind >= RowKind.DECODE_GPU) != seqs.is_decode).tolist():
        kind = RowKind(int(rows.kind[i])).name
        raise PlanError(f"{kind} row for sequence {rows.seq[i]}: {seqs[i]}")
    left = seqs.remaining
    wrong = (rows.n_new < 1) | (rows.n_new > left)
    if not view.enable_chunked_prefill:
        wrong |= rows.n_new != left
    for i in np.flatnonzero(wrong).tolist():
        raise PlanError(f"row of {rows.n_new[i]} tokens; sequence {rows.seq[i]} has {left[i]} left")


def _riders(plan: Plan, view: View) -> Seqs:
    if not len(plan.riders):
        return _NONE
    at = _find(plan.riders, view.running.id)
    riders = view.running.take(at[at >= 0])
    leaves = np.isin(riders.id, np.array(plan.preempt + plan.swap_in, np.int64))
    arrives = np.isin(riders.id, np.array(plan.swap_out, np.int64))
    stays = riders.is_decode & ((riders.place == Place.CPU) | arrives) & ~leaves
    if len(riders) != len(plan.riders) or not stays.all():
        raise PlanError(f"riders {plan.riders.tolist()} are not all CPU decodes that stay")
    return riders


def _check_groups(plan: Plan, riders: Seqs, view: View) -> None:
    """All riders on their way move on together, and one group starts."""
    if not len(riders):
        return
    if len(plan.batches) > 1 or any((b.kind == RowKind.DECODE_CPU).any() for b in plan.batches):
        raise PlanError("riders beside a second sub-batch or CPU decodes; one kind in a plan")
    starting = int((riders.ride == 0).sum())
    if starting > view.ride_capacity:
        raise PlanError(f"{starting} riders start; a group has {view.ride_capacity} places")
    on_way = view.running.id[view.running.ride > 0]
    gone = np.array(plan.preempt + plan.swap_in, np.int64)
    left = np.setdiff1d(on_way, np.concatenate((riders.id, gone)))
    if len(left):
        raise PlanError(f"riders {left.tolist()} are left behind on their way")


def _check_budgets(
    plan: Plan,
    rows: Rows,
    seqs: Seqs,
    riders: Seqs,
    moves: dict[str, Seqs],
    admitted: int,
    view: View,
) -> None:
    spent = {Place.GPU: 0, Place.CPU: 0}
    moved = np.array(plan.swap_out + plan.swap_in, np.int64)
    stay = ~np.isin(rows.seq, moved) if len(moved) else np.ones(len(rows), bool)
    for place in (Place.GPU, Place.CPU):
        here = stay & (rows.kind % 2 == (place is Place.CPU))
        growth = view.need(seqs, place) - seqs.held
        spent[place] += int(np.maximum(growth[here], 0).sum())
    if len(riders):
        riding = riders.take(~np.isin(riders.id, moved))
        spent[Place.CPU] += int(np.maximum(view.need(riding, Place.CPU) - riding.held, 0).sum())
    if len(moved):
        spent[Place.CPU] += int(view.need(moves["swap_out"], Place.CPU).sum())
        spent[Place.GPU] -= int(moves["swap_out"].held.sum())
        # Pages of a swap-in are free only after the plan: swaps out come first.
        spent[Place.GPU] += int(view.need(moves["swap_in"], Place.GPU).sum())
    for seq in moves["preempt"]:
        spent[seq.place] -= seq.held
    for name, value, limit in (
        ("tokens", int(rows.n_new.sum()) + len(riders), view.max_num_batched_tokens),
        ("sequences", admitted - len(plan.preempt), view.seats_free),
        ("GPU blocks", spent[Place.GPU], view.gpu_blocks_free),
        ("CPU pages", spent[Place.CPU], view.cpu_pages_free),
    ):
        if value > limit:
            raise PlanError(f"plan takes {value} {name}; there is room for {limit}")
