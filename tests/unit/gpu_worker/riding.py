"""A small model with groups of riders, and what transformers makes of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neo_native import RowKind
from tests.helpers.engine_rig import MAX_LEN, Row
from tests.helpers.tiny_llama import make_reference

TOLERANCE = 5e-5
SLOTS = 8
LAYERS = 3
GROUPS, PLACES = LAYERS + 1, 2
RIDES = {"ride_groups": GROUPS, "ride_capacity": PLACES}
PROMPT = 20


@pytest.fixture(scope="module", params=["llama2", "llama3.2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return folder, *make_reference(folder, request.param, SLOTS, MAX_LEN)


def ride(stage: int, start: int, token: int, slot: int = 0, place: int = 0) -> Row:
    return Row(slot, RowKind.RIDE_CPU, start, [token], stage == LAYERS, stage, place)
