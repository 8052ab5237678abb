"""NEO's load-aware schedule: the six steps of arXiv 2411.01142, section 3.2.

(1) Two empty batches. (2) GPU decodes into batch-0; sequences leave the GPU-cache while it would
overflow and come back while there is ample room. (3) Prefills into batch-0; their KV stays on the
GPU if it fits, else goes to the CPU. (4) CPU decodes into either batch while they are hidden.
(5) CPU-bound prefills are held back beyond the number of CPU-requests that pays. (6) The best of
the GPU-only plan, the two-batch plan and the further candidates of ``candidates`` is taken.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, sqrt

import numpy as np

from neo_server.cost_model import CostModel, Load, iteration_time
from neo_server.plan import Ints, Mode, Place, Plan, Seqs, SeqView, View
from neo_server.policies.candidates import Choice, Worth, best
from neo_server.policies.chunks import chunk_limit
from neo_server.policies.draft import Draft, decode_load
from neo_server.policies.fetching import fetching, first_on_cpu, worth_fetching
from neo_server.policies.population import population
from neo_server.policies.queue import Orders
from neo_server.policies.resting import rest

# A swap-in leaves this share of the GPU-cache free, so that it is not undone at once.
_AMPLE = 0.05
# With more CPU-requests than this beside short iterations of GPU decodes, how many pay is looked at
# only every few plans, for the sake of planning time.
_CROWD = 32
_SHORT_S = 0.01
_CONSIDERED = 4
# A rider that has more than this share of its stages behind it keeps them: it is moved later.
_EARLY = 0.25


def plan(view: View, cost: CostModel) -> Plan:
    """GPU decodes and prefills in batch-0; CPU decodes where they pay most."""
    draft = Draft(view)
    gpu, cpu, awaited = rest(draft, cost, *_place(draft, cost))
    gpu_decodes = gpu.take(gpu.is_decode)
    cpu_decodes = cpu.take(cpu.is_decode)
    draft.decode(gpu_decodes, Place.GPU)
    decode_only = decode_load(gpu_decodes, Place.GPU)
    worth = Worth.of(cost, decode_only, view)
    draft.tokens_left -= len(cpu_decodes)
    base = _prefill(draft, cost, worth, gpu, cpu, replace(decode_only, awaited=awaited))
    draft.tokens_left += len(cpu_decodes)
    if not len(cpu_decodes):
        return draft.build(estimate_s=iteration_time(cost, [base]) if base.tokens else None)
    return _with_cpu(draft, cost, worth, base, cpu_decodes)


def _place(draft: Draft, cost: CostModel) -> tuple[Seqs, Seqs]:
    """Step 2: who is on the GPU and who on the CPU in this iteration."""
    view = draft.view
    on_gpu, on_cpu = view.running.at(Place.GPU), view.running.at(Place.CPU)
    growth = int(np.maximum(view.need(on_cpu, Place.CPU) - on_cpu.held, 0).sum())
    leaving: list[SeqView] = []

    def evict(seq: SeqView) -> None:
        parks = view.cpu_workers > 0 and _may_park(cost, seq)
        if parks and draft.try_swap(seq, Place.CPU, reserve=growth):
            leaving.append(seq)
        else:
            draft.preempt(seq)

    gpu = draft.grow(on_gpu, Place.GPU, evict)
    if not (leaving or draft.preempted):
        returned = _swap_in(draft, cost, on_cpu, gpu)
        if returned:
            back = np.isin(on_cpu.id, returned)
            gpu, on_cpu = gpu.plus(on_cpu.take(back)), on_cpu.take(~back)
    if view.cpu_workers == 0 and (len(gpu) or leaving):
        return gpu, on_cpu.take(slice(0))  # they wait for a worker while others advance
    cpu = draft.grow(on_cpu, Place.CPU, draft.preempt)
    return gpu, cpu.plus(Seqs.of(leaving)) if leaving else cpu


def _may_park(cost: CostModel, seq: SeqView) -> bool:
    """One decode on the CPU, as the bound on skips asks for, costs less than a recompute."""
    one = Load(tokens=1, sampled=1)
    decode = iteration_time(cost, [one.with_cpu(1, seq.num_tokens)]) - iteration_time(cost, [one])
    redo = Load().with_prefill(seq.num_computed, 0, moved=False, last=True)
    return decode < iteration_time(cost, [redo])


def _swap_in(draft: Draft, cost: CostModel, on_cpu: Seqs, gpu: Seqs) -> list[int]:
    """While there is ample room the earliest come back: if nobody else wants it, or they starve.

    Riders are slow, and new arrivals can ride in their stead: they have the first right to room, as
    much as an arrival would find. So the CPU-cache is where requests wait, and advance meanwhile.
    """
    view = draft.view
    starving = _starving(view, on_cpu)
    if not len(on_cpu):
        return []
    relieves = bool(view.waiting) and not starving
    if relieves:
        if not (on_cpu.ride > 0).any():
            if not _passes_through(view, cost):
                return []
            on_cpu = on_cpu.take(on_cpu.skipped > 0)  # whom batches serve is no worse off there
        on_cpu = on_cpu.take(on_cpu.is_decode & (on_cpu.ride <= view.ride_groups * _EARLY))
        room = draft.free[Place.GPU] - -(-len(gpu) // view.block_size)
        on_cpu = on_cpu.take(view.need(on_cpu, Place.GPU) <= room)
    ample = int(_AMPLE * view.gpu_blocks_total) + 1
    returned: list[int] = []
    for seq in on_cpu:
        occupants = len(gpu) + len(returned)
        tight = starving or relieves
        reserve = -(-occupants // view.block_size) if tight else ample + occupants
        if draft.try_swap(seq, Place.GPU, reserve=reserve if occupants else 0):
            returned.append(seq.id)
        elif not (relieves or seq.ride):  # who rides may be passed: it advances where it is
            break
    return returned


def _starving(view: View, on_cpu: Seqs) -> bool:
    """CPU-requests are left out so often that they belong on the GPU, before any new arrival."""
    if not len(on_cpu):
        return False
    return view.cpu_workers == 0 or int(on_cpu.skipped.max()) >= view.max_skipped // 2


def _prefill(draft: Draft, cost: CostModel, worth: Worth, gpu: Seqs, cpu: Seqs, base: Load) -> Load:
    """Steps 3 and 5. Returns batch-0 without CPU decodes."""
    started = gpu.take(~gpu.is_decode).plus(cpu.take(~cpu.is_decode))
    pays = _Paying(draft, cost, worth, gpu, cpu)
    on_cpu, more = set(cpu.id.tolist()), pays.rows()
    cpu_prompt = first_on_cpu(draft.view, started, on_cpu, more)
    limit = chunk_limit(draft, cost, base, started, more, cpu_prompt)
    for seq in started:
        place = Place.CPU if seq.id in on_cpu else Place.GPU
        n_new = draft.prefill(seq, place, limit - int(base.tokens))
        base = _added(base, seq, n_new, place)
    if draft.preempted or draft.swap_out or _starving(draft.view, cpu):
        return base
    view, gpu_decodes, busy = draft.view, int(base.gpu_rows), pays.busy
    for seq in view.waiting:
        if busy and limit <= base.tokens:
            break
        reserve = -(-gpu_decodes // view.block_size) if busy else 0
        place = Place.GPU
        if not draft.can_admit(seq, Place.GPU, reserve):
            place = Place.CPU
            if not pays.takes(seq, base, limit, busy):
                break
            reserve = -(-len(cpu) // view.page_size) if busy else 0
        n_new = draft.admit(seq, place, reserve, limit - int(base.tokens))
        if not n_new:
            break
        base, busy = _added(base, seq, n_new, place), True
    return base


class _Paying:
    """How many CPU-requests more pay: looked at once a plan, and only where it matters."""

    def __init__(self, draft: Draft, cost: CostModel, worth: Worth, gpu: Seqs, cpu: Seqs) -> None:
        self._asked = draft, cost, worth, gpu, cpu
        self._more: int | None = None
        self._places: int | None = None  # on the CPU, left in this plan
        self.busy = bool(len(gpu) or len(cpu))

    def more(self, head: SeqView) -> int:
        """``head``: the first for which the GPU-cache has no room."""
        if self._more is None:
            self._more = _cpu_places(*self._asked, head)
        return self._more

    def takes(self, seq: SeqView, base: Load, limit: int, busy: bool) -> bool:
        """The CPU-cache is the place for the next that waits, which has none on the GPU."""
        draft, cost, worth, _, cpu = self._asked
        view = draft.view
        never = view.need(seq, Place.GPU) > view.gpu_blocks_total
        chunk = limit - base.gpu_rows
        if busy and not never and not worth_fetching(view, cost, worth.token, seq, chunk):
            return False
        if base.tokens > base.gpu_rows and 2 * (limit - base.tokens) < seq.remaining <= chunk:
            return False  # less than half would begin of what the next iteration takes whole
        if self._places is None:
            room = _waiting_room(view, cost, worth, chunk, base, seq)
            self._places = max(self.more(seq), room - len(cpu))
        if self._places == 0 and not (never and not busy):
            return False
        self._places = max(self._places - 1, 0)
        return True

    def rows(self) -> float:
        """By what they decode in an iteration; 0 while the GPU-cache has room."""
        draft, _, _, _, cpu = self._asked
        view = draft.view
        if not view.waiting:
            return 0.0
        if draft.can_admit(view.waiting[0], Place.GPU, 0):
            return 0.0
        # Of each: as those that are there did lately, or at least as one that rides.
        least = 1.0 / view.ride_groups if Mode.PIGGYBACK in view.modes else 1.0
        lately = view.cpu_decodes / max(int(cpu.is_decode.sum()), 1)
        return self.more(view.waiting[0]) * min(max(lately, least), 1.0)


def _added(base: Load, seq: SeqView, n_new: int, place: Place) -> Load:
    if not n_new:
        return base
    last = n_new == seq.remaining
    return base.with_prefill(n_new, seq.num_computed, moved=place is Place.CPU, last=last)


def _cpu_places(
    draft: Draft, cost: CostModel, worth: Worth, gpu: Seqs, cpu: Seqs, head: SeqView
) -> int:
    """Step 5: how many CPU-requests more pay in the iterations to come."""
    view = draft.view
    if view.cpu_workers == 0:
        return 0
    if not len(gpu):
        return view.seats_free  # the GPU-cache holds nothing: any progress is welcome
    tokens, on_way = int(cpu.num_tokens.sum()) + head.num_tokens, int((cpu.ride > 0).sum())
    mean = tokens / (len(cpu) + 1)
    if not on_way:  # they grow while they stay; riders are slow, and soon move on to the GPU
        mean += view.mean_output / 2
    plan_id, wanted = view.kept.get("population", (-_CONSIDERED, 0))
    hurried = len(cpu) > _CROWD and iteration_time(cost, [worth.decode_only]) < _SHORT_S
    if not hurried or view.plan_id - plan_id >= _CONSIDERED:
        wanted = population(view, cost, worth, len(cpu), mean, on_way)
        view.kept["population"] = view.plan_id, wanted
    return max(wanted - len(cpu), 0)


def _waiting_room(
    view: View, cost: CostModel, worth: Worth, chunk: float, base: Load, head: SeqView
) -> int:
    """CPU places for prompts that are prefilled while GPU places for them get free.

    A prompt takes the room of the whole sequence while nothing of it decodes. In the CPU-cache it
    takes none of the GPU's, and comes over when it is whole: as many as end in the meantime, and
    their spread, as sequences end at random. None where what it stores and fetches costs more than
    one more row would decode meanwhile.
    """
    if not (view.mean_output and _passes_through(view, cost)):
        return 0
    iterations = head.remaining / max(chunk, 1.0)
    if fetching(cost, head, chunk) > iterations * worth.token:
        return 0
    ends = iterations * base.gpu_rows / view.mean_output
    return ceil(ends + sqrt(ends))


def _passes_through(view: View, cost: CostModel) -> bool:
    """Requests may wait in the CPU-cache for a GPU place: moving them costs no time."""
    return view.enable_chunked_prefill and cost.overlaps_transfers


def _with_cpu(draft: Draft, cost: CostModel, worth: Worth, base: Load, decodes: Seqs) -> Plan:
    """Steps 4 and 6."""
    orders = Orders.of(draft.view, decodes.take(slice(max(draft.tokens_left, 0))))
    choice = best(draft.view, cost, worth, base, orders.queue(draft.view))
    return _built(draft, choice, orders)


def _built(draft: Draft, choice: Choice, orders: Orders) -> Plan:
    queue = orders.for_batches
    second = queue.take(slice(choice.second))
    first = queue.take(slice(choice.second, choice.second + choice.first))
    draft.decode(_by_arrival(first), Place.CPU)
    draft.decode(_by_arrival(second), Place.CPU, batch=1 if draft.has_gpu_work else 0)
    riders: Ints = np.sort(orders.for_riders.id[: choice.riders])
    return draft.build(riders, choice.seconds)


def _by_arrival(seqs: Seqs) -> Seqs:
    return seqs.take(np.argsort(seqs.id))
