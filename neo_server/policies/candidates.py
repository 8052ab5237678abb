"""The plans that ``neo`` chooses between, once batch-0's GPU rows and prefills are known.

The objective is tokens per second, with a token worth what it costs without the CPU: a GPU-only
iteration is worth its own time, and each further token of a CPU-request is worth the GPU-only time
per decoded token. A candidate with a worth above its duration pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neo_server.cost_model import CostModel, Load, Ride, Stages, iteration_time
from neo_server.plan import Mode, View
from neo_server.policies.queue import Queue, TokensOf

CpuAttn = Callable[[float, float], float]  # seconds of so many rows and tokens

# The price of a prompt token is looked at with this many times as many of them.
_FURTHER = 1.5
# A token is worth this share of its time at least.
_LEAST_WORTH = 0.05
# A candidate, and a further CPU-request, has to promise more than the cost model's noise.
GAIN = 1.01
# Standing still costs riders time, so a wave goes on unless the GPU alone is better by this much.
_WAVE_GAIN = 1.02
# A wave takes a token's time to build up and to replace, so it begins, or is given up for batches,
# only for this much.
_SWITCH_GAIN = 1.1
# Tokens for which a rider rides, at a guess.
_STAYS = 16
# Riders' attention takes this share of the iteration at most: what is late delays GPU rows too.
_HIDDEN = 0.95


@dataclass(frozen=True, slots=True)
class Worth:
    """What a further decoded token is worth: seconds."""

    token: float
    decode_only: Load

    @staticmethod
    def of(cost: CostModel, decode_only: Load, view: View) -> Worth:
        """From an iteration of the GPU decodes alone; without any, of a single token.

        A token more brings a request's end nearer, and with it the next one's prompt. Below the
        knee of the linear stage a prompt costs nothing; beyond it, it takes away from what the
        token gains. So the time of an iteration with all the prompt tokens that its decodes call
        for is shared out between both kinds, the prompt's at its marginal price.
        """
        rows = max(decode_only.gpu_rows, 1)
        load = decode_only if decode_only.tokens else Load(tokens=1, sampled=1)
        if not (view.mean_output and view.enable_chunked_prefill):
            return Worth(iteration_time(cost, [load]) / rows, decode_only)
        now = iteration_time(cost, [fed(view, load, rows)])
        more = iteration_time(cost, [fed(view, load, _FURTHER * rows)])
        prompts = (more - now) / (_FURTHER - 1.0)
        return Worth(max(now - prompts, _LEAST_WORTH * now) / rows, decode_only)


@dataclass(frozen=True, slots=True)
class Choice:
    """The first ``second`` of the queue go to batch-1, the next ``first`` to batch-0."""

    first: int = 0
    second: int = 0
    riders: int = 0  # those on their way, then the first of those that may start
    seconds: float = 0.0
    score: float = 1.0  # worth over duration

    @property
    def rows(self) -> int:
        """CPU decodes that it holds."""
        return self.first + self.second + self.riders

    def decoded(self, view: View) -> float:
        """Tokens that CPU-requests get."""
        return self.first + self.second + self.riders / max(view.ride_groups, 1)


def best(view: View, cost: CostModel, worth: Worth, base: Load, queue: Queue) -> Choice:
    """Step 6: the candidate of the highest score; ``base`` is batch-0 without CPU decodes.

    A stage that a rider has passed counts as its share of a token: gained when it rides, lost when
    a batch serves it. So a wave is left standing or given up for what that is worth.
    """
    if view.cpu_workers == 0:  # nothing else is left to do: a worker may come
        return Choice(first=queue.count)
    alone = iteration_time(cost, [base]) if base.tokens else 0.0
    winner = Choice(seconds=alone) if base.tokens and not queue.forced else None
    bar = GAIN
    for first, second in _shapes(view, cost, base, queue):
        seconds = _time(cost, base, queue, first, second)
        gained = first + second - queue.lost(first + second)
        score = (alone + worth.token * gained) / seconds
        late = view.tpot_slo_s is not None and seconds > view.tpot_slo_s
        if winner is None or (score > bar and not late):
            winner, bar = Choice(first, second, 0, seconds, score), score
    over_gpu, over_batches = (_WAVE_GAIN, _SWITCH_GAIN) if queue.on_way else (1.0, 1 / _SWITCH_GAIN)
    serves_most = winner is not None and 2 * winner.rows > queue.count
    edge = over_batches if serves_most else over_gpu
    for wave in _rides(view, cost, worth, base, queue, alone):
        late = view.tpot_slo_s is not None and wave.seconds * view.ride_groups > view.tpot_slo_s
        if winner is None or (edge * wave.score > bar and not late):
            winner, bar = wave, edge * wave.score
    return winner or Choice(first=max(queue.forced, min(queue.count, 1)))


def _shapes(view: View, cost: CostModel, base: Load, queue: Queue) -> Iterator[tuple[int, int]]:
    """Rows of batch-0 and of batch-1, most of them within what is hidden."""
    count, tokens, forced = queue.count, queue.tokens, queue.forced
    if Mode.ONE_BATCH in view.modes:
        fewer: tuple[int, ...] = ()
        if forced < count:
            hidden = _fitting(cost.cpu_attn, count, tokens, 0, Stages.of(cost, base).gpu_attn)
            fewer = (hidden, forced, *(count >> shift for shift in range(1, 5)))
        for rows in {count, *fewer}:
            if rows >= max(forced, 1):
                yield rows, 0
    if Mode.TWO_BATCHES in view.modes:
        for first, second in _pipelines(cost, base, count, tokens):
            if first + second >= forced:
                yield first, second


def _pipelines(
    cost: CostModel, base: Load, count: int, tokens: TokensOf
) -> Iterator[tuple[int, int]]:
    """Step 4: T_ca1 within all of batch-0, then T_ca0 within what is left of the cycle."""
    if not base.tokens:  # CPU rows alone: two halves hide each other's linear stages
        if count:
            yield count - count // 2, count // 2
        return
    zero = Stages.of(cost, base)
    beside = zero.linear + zero.gpu_attn + zero.handoff  # what batch-0 is without CPU rows
    second = max(_fitting(cost.cpu_attn, count, tokens, 0, beside), min(count, 1))
    one = cost.linear(second) + 2 * cost.handoff(second)
    both = _fitting(cost.cpu_attn, count, tokens, 0, beside + one)
    first = _fitting(cost.cpu_attn, both - second, tokens, second, one + zero.gpu_attn)
    if first > 0:
        yield first, second
    if second:
        yield 0, second
    if count > second + max(first, 0):
        both = _balanced(cost, zero, count, tokens)
        yield count - both, both


def _balanced(cost: CostModel, zero: Stages, count: int, tokens: TokensOf) -> int:
    """Of all ``count`` rows, those in batch-1 for which both chains are as long: T_l + T_ca.

    With more rows than the GPU's work hides, the CPU is what counts. All of them in one batch would
    leave it idle for that batch's linear stage.
    """
    one = cost.linear(count / 2) + cost.handoff(count / 2)
    cpu = cost.cpu_attn(count, tokens(count))
    return max(_fitting(cost.cpu_attn, count, tokens, 0, (cpu + zero.linear - one) / 2), 1)


def _rides(
    view: View, cost: CostModel, worth: Worth, base: Load, queue: Queue, alone: float
) -> Iterator[Choice]:
    """Those on their way, and as many more as the CPU can serve one layer of in an iteration.

    A wave fills one group a plan, so it is judged by what it comes to; those on their way alone, as
    they are. ``alone``: seconds of ``base``.
    """
    if Mode.PIGGYBACK not in view.modes or not base.tokens or queue.due > queue.starters:
        return
    least, most = queue.on_way + queue.due, queue.on_way + queue.starters

    def wave(riders: int, tokens: TokensOf) -> tuple[float, float]:
        ride = Ride.spread(riders, tokens(riders), view.ride_groups, view.ride_capacity)
        seconds = iteration_time(cost, [base], ride)
        return seconds, (alone + worth.token * riders / view.ride_groups) / seconds

    if least:
        seconds, score = wave(least, queue.ride_tokens)
        yield Choice(riders=least, seconds=seconds, score=score)
    now = hidden_riders(view, cost, alone, most, queue.ride_tokens)
    waits = _waits(view, cost, worth, queue)
    if waits:
        now = min(now, least)
    if now > least or (waits and least):
        places = view.ride_groups * view.ride_capacity
        full = hidden_riders(view, cost, alone, min(queue.count, places), queue.tokens)
        _, score = wave(max(full, now), queue.tokens)
        now = max(now, least)
        seconds, _ = wave(now, queue.ride_tokens)
        yield Choice(riders=now, seconds=seconds, score=score)


def _waits(view: View, cost: CostModel, worth: Worth, queue: Queue) -> bool:
    """Those that may start had better wait for groups on their way that have places for them.

    That costs each of them half a token or so, once; a group of their own costs a hand-off in
    every iteration for as long as they ride.
    """
    if queue.due or queue.starters > queue.places or queue.starters >= view.ride_capacity:
        return False
    signals = cost.ride_handoff(1) - cost.ride_handoff(0)
    return worth.token * queue.starters / 2 < _STAYS * view.ride_groups * signals


def hidden_riders(view: View, cost: CostModel, alone: float, most: int, tokens: TokensOf) -> int:
    """Riders whose attention an iteration hides that takes ``alone`` and their hand-offs."""
    attn = cost.ride_attn
    least = _fitting(attn, most, tokens, 0, _HIDDEN * alone)
    full = least // max(view.ride_capacity, 1)
    empty = max(cost.num_layers - full, 0) * cost.ride_handoff(0)
    handoffs = empty + full * cost.ride_handoff(view.ride_capacity)
    return _fitting(attn, most, tokens, 0, _HIDDEN * (alone + handoffs))


def _time(cost: CostModel, base: Load, queue: Queue, first: int, second: int) -> float:
    tokens = queue.tokens
    middle = tokens(second)
    zero = base.with_cpu(first, tokens(second + first) - middle) if first else base
    if not second:
        return iteration_time(cost, [zero])
    one = Load().with_cpu(second, middle)
    return iteration_time(cost, [zero, one] if zero.tokens else [one])


def _fitting(attn: CpuAttn, count: int, tokens: TokensOf, skip: int, seconds: float) -> int:
    """Most rows, after the first ``skip``, whose T_ca is within ``seconds``."""
    low, high = 0, max(count, 0)
    before = tokens(skip)
    while low < high:
        middle = (low + high + 1) // 2
        if attn(middle, tokens(skip + middle) - before) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def fed(view: View, decode_only: Load, decoded: float) -> Load:
    """With as many prompt tokens as ``decoded`` tokens use up: a request has so many of each."""
    n_new = round(decoded * view.mean_prompt / view.mean_output)
    n_new = min(n_new, view.max_num_batched_tokens)
    return decode_only.with_prefill(n_new, 0, moved=False, last=False) if n_new else decode_only
