"""How many CPU-requests pay: step 5, the one that looks ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from neo_server.cost_model import CostModel, Load, iteration_time
from neo_server.plan import Mode, View
from neo_server.policies.candidates import GAIN, Worth, best, fed, hidden_riders
from neo_server.policies.queue import crowd

# Of iterations: how often each comes, what it does, and its seconds without CPU-requests.
Kinds = Sequence[tuple[float, Load, float]]
# A CPU-request stays for all its tokens, while the load around it changes.
_LASTING_GAIN = 1.05


def population(
    view: View, cost: CostModel, worth: Worth, present: int, mean: float, on_way: int
) -> int:
    """Step 5: how many CPU-requests of ``mean`` tokens pay in the iterations to come.

    They have to pay beside the GPU's decodes alone; how many, is chosen over a mix of such
    iterations and of those with prefills, as frequent as they were lately. In either kind the
    CPU-requests may sit out. Two sub-batches have a fixed price, so a few requests may not pay
    where many do. A wave takes a crowd that has to be prefilled first: unless a good part of it is
    ``on_way`` already, it has to promise that much more than batches do.
    """
    most = present + min(view.seats_free, int(view.cpu_pages_free * view.page_size / mean))
    kinds = _timed(cost, _kinds(view, worth, present))
    decode_only = _timed(cost, [(1.0, worth.decode_only)])

    def gain(count: int, kinds: Kinds) -> tuple[float, bool]:
        spent = value = 0.0
        for share, load, alone in kinds:
            joined = best(view, cost, worth, load, crowd(view, count, mean))
            if not joined.rows or count > joined.rows * view.max_skipped:
                # The bound on skips lets them in at any price.
                due = -(-count // view.max_skipped)
                joined = best(view, cost, worth, load, crowd(view, due, mean, forced=due))
            spent += share * joined.seconds
            value += share * (alone + worth.token * joined.decoded(view))
        return value / spent, joined.riders > 0

    reached = gain(present, kinds)[0] if present else 1.0
    wanted, bar = present, max(reached * 1.002, _LASTING_GAIN)
    waves = _waves(view, cost, worth.decode_only, mean, present, most)
    riding = on_way > 0 and 4 * on_way >= max(waves, default=0)
    wave_bar = bar if riding else bar * _LASTING_GAIN
    hopeless = False
    for count in sorted(waves.union(_growing(present, most))):
        if hopeless and count not in waves:
            continue
        promised, rides = gain(count, kinds)
        pays = promised >= (wave_bar if rides else bar)
        if pays and gain(count, decode_only)[0] >= GAIN:
            wanted, bar = count, promised * 1.002
            wave_bar = bar if rides or riding else bar * _LASTING_GAIN
        elif promised < reached and count > 2 * present + 16:
            hopeless = True
    return wanted


def _timed(cost: CostModel, kinds: Sequence[tuple[float, Load]]) -> Kinds:
    return [
        (share, load, iteration_time(cost, [load]) if load.tokens else 0.0) for share, load in kinds
    ]


def _kinds(view: View, worth: Worth, present: int) -> Sequence[tuple[float, Load]]:
    """Iterations to come.

    Chunks are spread evenly; whole prompts come as often as lately, but no more often than
    sequences end: while caches fill they come in bursts.
    """
    load, rows = worth.decode_only, worth.decode_only.gpu_rows
    if not view.mean_output:
        return [(1.0, load)]
    if view.enable_chunked_prefill:
        return [(1.0, fed(view, load, rows))]
    share = min(view.prefill_share, (rows + present) / view.mean_output)
    if share <= 0.0:
        return [(1.0, load)]
    n_new = max(int(view.prefill_tokens), 1)
    return [(1.0 - share, load), (share, load.with_prefill(n_new, 0, moved=False, last=False))]


def _growing(present: int, most: int) -> Iterator[int]:
    count = present + 1
    while count <= most:
        yield count
        count += max(1, count // 2)


def _waves(
    view: View, cost: CostModel, base: Load, mean: float, present: int, most: int
) -> set[int]:
    """Crowds that ride: as many as the CPU serves, and fewer, in full groups.

    A few may not pay for their hand-offs; a group that is not full costs as much as a full one.
    """
    if Mode.PIGGYBACK not in view.modes or not base.tokens:
        return set()
    places = (view.ride_groups - 1) * view.ride_capacity
    alone = iteration_time(cost, [base])
    fit = hidden_riders(view, cost, alone, min(most, places), lambda k: k * mean)
    groups = fit // max(view.ride_capacity, 1)
    crowds = {part * view.ride_capacity for part in (groups // 4, groups // 2, groups)}
    return {count for count in crowds | {fit} if count > present}
