from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest

import neo_native as nn
from neo_native import segments as sg
from tests.unit.native.rig import geometry

N = 200


@pytest.fixture
def segs() -> Iterator[sg.SegmentSet]:
    made = sg.create_all(geometry())
    yield made
    sg.unlink_all(made)
    made.close()


def pong(instance_id: str, what: str, spin_us: int, gap_us: int) -> None:
    attached = sg.attach_all(instance_id)
    one_way, round_trip = play(attached, what, spin_us, gap_us, ping=False)
    assert len(one_way) == N
    assert len(round_trip) == 0
    attached.close()


def play(
    segs: sg.SegmentSet, what: str, spin_us: int, gap_us: int, *, ping: bool
) -> tuple[nn.Array, nn.Array]:
    if what == "ring":
        return nn.probe_rings(segs.steps, segs.results, segs.geometry, ping, N, spin_us, gap_us)
    return nn.probe_bells(segs.work, segs.geometry, ping, N, spin_us, gap_us)


@pytest.mark.parametrize(("spin_us", "gap_us"), [(1000, 0), (0, 50)])
@pytest.mark.parametrize("what", ["ring", "doorbell"])
def test_every_message_is_timed_on_both_sides(
    segs: sg.SegmentSet, what: str, spin_us: int, gap_us: int
) -> None:
    other = multiprocessing.get_context("spawn").Process(
        target=pong, args=(segs.location.instance_id, what, spin_us, gap_us)
    )
    other.start()
    one_way, round_trip = play(segs, what, spin_us, gap_us, ping=True)
    other.join(30)
    assert other.exitcode == 0
    assert one_way.shape == round_trip.shape == (N,)
    assert (one_way <= round_trip).all()
    assert (np.asarray(one_way) < 60e9).all()  # a stamp of the same clock, not of another


def test_a_silent_partner_is_an_error(segs: sg.SegmentSet) -> None:
    with pytest.raises(nn.NativeError, match="silent in round 0"):
        nn.probe_bells(segs.work, segs.geometry, True, 1, 0, timeout_s=0.01)
