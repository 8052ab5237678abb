"""Which profiles are kept and which of them are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.profile_store import REVISION, load_or_profile, profile_key, profile_path
from protos.config import EngineConfig


@pytest.fixture
def key(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(model_path=str(tmp_path))
    return profile_key(config, "device", 1, threads=2, offloads=True)


def found(key: dict[str, Any], folder: Path, cpu_attn: float | None) -> Any:
    return json.loads(load_or_profile(key, str(folder), lambda: {"cpu_attn": cpu_attn}))["cpu_attn"]


def test_a_table_is_measured_once(key: dict[str, Any], tmp_path: Path) -> None:
    assert [found(key, tmp_path, x) for x in (1.0, 2.0)] == [1.0, 1.0]


def test_a_table_is_not_kept_where_cpu_workers_failed(key: dict[str, Any], tmp_path: Path) -> None:
    assert [found(key, tmp_path, x) for x in (None, 2.0, 3.0)] == [None, 2.0, 2.0]


def test_a_table_without_cpu_workers_is_kept(key: dict[str, Any], tmp_path: Path) -> None:
    assert [found(key | {"cpu_attn_threads": 0}, tmp_path, x) for x in (None, 2.0)] == [None, None]


def test_tables_whose_figures_mean_something_else_are_not_used(
    key: dict[str, Any], tmp_path: Path
) -> None:
    assert key["revision"] == REVISION
    older = {name: value for name, value in key.items() if name != "revision"}
    for other in (older, older | {"revision": REVISION - 1}):
        assert profile_path(other, str(tmp_path)) != profile_path(key, str(tmp_path))
        found(other, tmp_path, 1.0)
    assert found(key, tmp_path, 2.0) == 2.0
