"""docs/deploy: the dashboard and Prometheus name only what the server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from neo_server.engine import Engine
from neo_server.prometheus import make_registry
from tests.unit.neo_server.simulation import Simulation, Sizes
from tests.unit.neo_server.test_engine import TOKENIZER
from tests.unit.neo_server.test_prometheus import state_of

DEPLOY = Path(__file__).resolve().parents[3] / "docs" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/neo.json").read_text(encoding="utf-8"))
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
# What no dashboard needs: of these the answer is a log line or a load balancer's affair.
NOT_SHOWN = {"neo:num_tokens_waiting"}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def names_of(expression: str) -> list[str]:
    return re.findall(r"neo:[a-z0-9_]+", expression)


@pytest.fixture
def families() -> dict[str, Any]:
    """What a server that is ready exports, by name."""
    simulation = Simulation(Sizes(policy="mixed"))
    engine = Engine(simulation.scheduler, simulation, TOKENIZER, simulation.make_blocks, 100)
    found = {family.name: family for family in make_registry(state_of(engine)).collect()}
    return {name: family for name, family in found.items() if name.startswith("neo:")}


def test_every_metric_of_the_dashboard_is_exported(families: dict[str, Any]) -> None:
    exported = {name + end for name, f in families.items() for end in SUFFIXES[f.type]}
    variables = [item["query"] for item in DASHBOARD["templating"]["list"]]
    for expression in [*expressions(), *variables]:
        assert set(names_of(expression)) <= exported, expression


def test_every_metric_is_in_the_dashboard(families: dict[str, Any]) -> None:
    shown = {name for expression in expressions() for name in names_of(expression)}
    for name, family in families.items():
        if name not in NOT_SHOWN:
            assert shown & {name + end for end in SUFFIXES[family.type]}, name


def test_counters_and_histograms_are_shown_as_rates_and_gauges_as_they_are(
    families: dict[str, Any],
) -> None:
    gauges = {name for name, family in families.items() if family.type == "gauge"}
    for expression in expressions():
        for name in names_of(expression):
            is_rate = re.search(rf"(rate|increase)\({re.escape(name)}\{{", expression)
            assert bool(is_rate) == (name not in gauges), expression


def test_panels_have_their_own_place_and_id() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in panels
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24  # Grafana's columns
