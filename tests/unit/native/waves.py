"""Groups of riders on their way through the layers, every O checked against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import neo_native as nn
from tests.unit.native.rig import NONE, Rig, decode, tolerance

TOKENS = [300, 17, 700, 1, 64]  # of each slot
LAYERS = 3
RIDES = {"n_layers": LAYERS, "ride_groups": LAYERS + 1, "ride_capacity": 3, "max_rows": 16}
WAIT_S = 60.0


@dataclass
class Wave:
    """One group: who rides where, and what the plan that named it last published."""

    group: int
    stage: int = -1  # of that plan; -1: none
    places: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    q: dict[int, nn.Array] = field(default_factory=dict)  # by place

    def fill(self, places: list[int], slots: list[int], lens: list[int]) -> None:
        """New riders, before stage 0."""
        self.stage, self.places, self.slots, self.lens = -1, places, slots, lens

    def leave(self, place: int) -> None:
        """A rider vanishes."""
        at = self.places.index(place)
        for column in (self.places, self.slots, self.lens):
            del column[at]

    def move(self) -> tuple[int, int, nn.Array, nn.Array, nn.Array]:
        """What the next plan says of it."""
        columns = (self.places, self.slots, self.lens)
        return (self.group, self.stage + 1, *(np.array(c, np.uint32) for c in columns))


class Waves:
    """Plans that move some groups by a stage each."""

    def __init__(self, r: Rig, exchange: nn.Exchange, plan_id: int = 0) -> None:
        self.rig, self.exchange, self.plan_id = r, exchange, plan_id
        self.waves = [Wave(group) for group in range(r.dim("ride_groups"))]
        self.checked = 0  # rows
        self.given_up = 0  # jobs whose group began anew, counted by whoever refills it

    def run(self, waves: list[Wave]) -> None:
        """One plan; ends it."""
        ordered = sorted(waves, key=lambda wave: wave.stage)
        moves = [wave.move() for wave in ordered]
        self.exchange.begin_plan(self.plan_id, (NONE, NONE), (NONE, NONE), moves)
        self.plan_id += 1
        for wave in ordered:
            self.advance(wave)
        self.exchange.end_plan()

    def advance(self, wave: Wave) -> None:
        """Takes O of the layer before, publishes Q of the next, within a plan."""
        wave.stage += 1
        if wave.stage > 0:
            assert self.exchange.ride_wait(wave.group, WAIT_S), "never done"
            self.collect(wave)
        if wave.stage < self.rig.dim("n_layers"):
            q = self.rig.queries(len(wave.places))
            wave.q = dict(zip(wave.places, q, strict=True))
            self.exchange.ride_publish(wave.group, q)

    def collect(self, wave: Wave) -> None:
        """O against the reference."""
        act = self.rig.dim("act_dtype")
        q = np.stack([wave.q[place] for place in wave.places])
        out = np.zeros_like(q)
        self.exchange.ride_collect(wave.group, out)
        slots, lens = np.array(wave.slots), np.array(wave.lens)
        right = self.rig.expected(wave.stage - 1, q, slots, lens)
        np.testing.assert_allclose(decode(out, act), right, atol=tolerance(act), rtol=0)
        self.checked += len(out)
