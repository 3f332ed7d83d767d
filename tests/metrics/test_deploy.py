# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts: every expression parses, and asks for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from profilemate.format.totals import BANDS, RECORDING
from profilemate.metrics.catalogue import METRICS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OF_PROMETHEUS = {"up"}
EVERYWHERE = {"instance", "job"}
"""Labels that Prometheus adds."""
WORDS = {
    "band": {*BANDS},
    "state": {"held", "cached", "free", "used", *RECORDING},
    "dummy": {"yes", "no"},
    "graph": {"yes", "no"},
    "job": {"profilemate"},
}

SERIES = {
    name: {*metric.labels} | EVERYWHERE | ({"le"} if name.endswith("_bucket") else set())
    for metric in METRICS
    for name in (
        [f"{metric.name}_{end}" for end in ("bucket", "count", "sum")]
        if metric.kind == "histogram"
        else [metric.shown]
    )
}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (DEPLOY / "grafana" / "dashboards" / "profilemate.json").read_text()
    )
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
    for rule in rules():
        yield rule["expr"]


EXPRESSIONS = sorted({*expressions()})


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_it_asks_for_what_there_is(expression: str) -> None:
    """Names, labels and values, found by their shape."""
    selected = re.findall(r"\b(profilemate_\w+|up)\b(?:\{([^}]*)\})?", expression)
    assert selected
    for name, matchers in selected:
        assert name in SERIES or name in OF_PROMETHEUS, name
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in SERIES.get(name, EVERYWHERE), (name, label)
            assert value == ".*" or value in WORDS[label], (label, value)
    used = {
        label
        for _, labels in re.findall(r"\b(by|on) \(([^)]*)\)", expression)
        for label in re.split(r",\s*", labels)
        if label
    }
    known = set.union(*(SERIES.get(name, EVERYWHERE) for name, _ in selected))
    assert used <= known


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_it_parses(expression: str) -> None:
    """By an implementation of Prometheus's grammar."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    assert promql.parse(expression)


def test_counters_are_rated_and_gauges_are_not() -> None:
    """A counter's value is the time since the session began."""
    kinds = {metric.shown: metric.kind for metric in METRICS}
    totals = {"profilemate_recorder_dropped_events_total", "profilemate_recorder_mismatches_total"}
    for expression in EXPRESSIONS:
        rated = set(re.findall(r"(?:rate|increase)\s*\((\w+)", expression))
        for name in set(re.findall(r"profilemate_\w+", expression)) - totals:
            is_counter = kinds.get(name, "counter") == "counter"
            assert is_counter == (name in rated), (name, expression)


def test_every_alert_has_its_runbook_and_its_section() -> None:
    docs = (ROOT / "docs" / "metrics.md").read_text()
    names = [rule["alert"] for rule in rules()]
    assert re.findall(r"^### (\w+)$", docs, re.MULTILINE) == names
    for rule in rules():
        notes = rule["annotations"]
        assert notes["summary"].endswith(".")
        assert f"docs/metrics.md#{rule['alert'].lower()}" in notes["runbook"]
        assert rule["labels"]["severity"] in ("info", "warning")


def test_the_dashboard_holds_together() -> None:
    """No two panels lie on each other, each has a title and says what to look for."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({*cells}) == len(cells)
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["datasource"]["uid"] == "${datasource}"


def test_provisioning_names_what_is_there() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((folder / "dashboards" / "profilemate.yml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] in (ROOT / "docs" / "metrics.md").read_text()
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert prometheus["rule_files"] == ["rules.yml"]
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] in WORDS["job"]
