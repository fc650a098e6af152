"""The dashboard and the alert rules: every query parses, and asks for metrics and labels that the services have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.unit.test_metrics import SERVICES, described, names, registry_of

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/tinsmith.json").read_text())
RULES = [rule for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
RULES_TEST = Path(__file__).parent / "alerts.test.yml"
CI = "TINSMITH_CI"
"""Set in CI: there a missing promtool is a failure."""

PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "severity"}}
"""Series that Prometheus itself makes, with their labels."""


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panels(panel) if panel.get("panels") else ()


QUERIES = [
    *((panel["title"], one["expr"]) for panel in panels(DASHBOARD) for one in panel.get("targets", [])),
    *((note["name"], note["expr"]) for note in DASHBOARD["annotations"]["list"]),
    *((rule["alert"], rule["expr"]) for rule in RULES),
]


def known() -> dict[str, set[str]]:
    """Labels by time series."""
    found = dict(PROMETHEUS)
    for service in SERVICES:
        labels = {metric.name: set(metric.labels) for metric in described(registry_of(service))}
        for name in names(service):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            found[name] = {"job", "instance", *labels.get(name, labels.get(base, set()))}
            if name.endswith("_bucket"):
                found[name].add("le")
    found["gateway_sampler_state"].add("gateway_sampler_state")
    return found


KNOWN = known()


def selectors(tree: Any) -> Iterator[Any]:
    """Every vector selector below a node of a parsed query."""
    match tree:
        case promql_parser.VectorSelector():
            yield tree
        case promql_parser.MatrixSelector():
            yield tree.vector_selector
        case promql_parser.Call():
            for argument in tree.args:
                yield from selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from selectors(tree.expr)
        case promql_parser.SubqueryExpr():
            yield from selectors(tree.expr)
        case promql_parser.BinaryExpr():
            yield from selectors(tree.lhs)
            yield from selectors(tree.rhs)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            raise AssertionError(f"{type(tree).__name__} is not known here")


def unknown_in(query: str) -> set[str]:
    """Series and labels of a query that no service has. Raises ValueError for a query that does not parse."""
    wrong = set()
    for selector in selectors(promql_parser.parse(query.replace("$__rate_interval", "5m"))):
        if selector.name not in KNOWN:
            wrong.add(selector.name)
            continue
        asked = {matcher.name for matcher in selector.matchers.matchers}
        wrong |= {f"{selector.name}{{{label}}}" for label in asked - KNOWN[selector.name]}
    return wrong


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}: {query[:40]}" for title, query in QUERIES])
def test_a_query_parses_and_asks_for_what_there_is(title: str, query: str) -> None:
    assert unknown_in(query) == set()


def test_the_check_of_queries_finds_what_is_wrong() -> None:
    assert unknown_in('sum(rate(trainer_tokens_totals[5m])) / up{jobb="x"}') == {"trainer_tokens_totals", "up{jobb}"}
    with pytest.raises(ValueError, match=r"invalid promql|unexpected|unclosed"):
        unknown_in("sum(rate(up[5m])")


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in panels(DASHBOARD):
        for target in panel.get("targets", []):
            kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in (kept[1] if kept else "job instance"), (panel["title"], label)


def test_panels_do_not_lie_on_each_other_and_have_ids_of_their_own() -> None:
    all_panels = list(panels(DASHBOARD))
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in all_panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_panels_ask_the_datasource_that_is_provisioned() -> None:
    provisioned = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    (datasource,) = provisioned["datasources"]
    used = {one["datasource"]["uid"] for panel in panels(DASHBOARD) for one in panel.get("targets", [])}
    assert used == {datasource["uid"]}
    assert datasource["url"] == "http://prometheus:9090"


def test_the_dashboard_is_where_its_provider_looks() -> None:
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/tinsmith.yaml").read_text())["providers"]
    grafana = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_the_manual_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert f"\n### {rule['alert']}\n" in (ROOT / "docs/operations.md").read_text()


def test_the_manual_explains_no_alert_that_is_gone() -> None:
    manual = (ROOT / "docs/operations.md").read_text()
    explained = re.findall(r"^### (\w+)$", manual[manual.index("\n## Alerts\n") :].split("\n## ")[1], re.MULTILINE)
    assert explained == [rule["alert"] for rule in RULES]


def test_counters_of_alerts_are_there_from_the_start() -> None:
    """A series that begins at 28 has no increase: the event that it counts would be told by nobody."""
    there = {
        sample.name for service in SERVICES for metric in registry_of(service).collect() for sample in metric.samples
    }
    increases = {name for rule in RULES for name in re.findall(r"\bincrease\((\w+)", rule["expr"])}
    assert "trainer_replayed_operations_total" in increases
    assert increases <= there


def test_every_alert_is_seen_to_fire_and_to_stay_silent() -> None:
    """promtool says nothing of a rule without a test, and takes a name that no rule has for one that is silent."""
    cases = [one for test in yaml.safe_load(RULES_TEST.read_text())["tests"] for one in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in RULES}
    assert {one["alertname"] for one in cases if one.get("exp_alerts")} == alerts
    assert {one["alertname"] for one in cases if not one.get("exp_alerts")} == alerts


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        reason = "promtool is not installed: apt-get install prometheus"
        pytest.fail(reason) if os.environ.get(CI) else pytest.skip(reason)
    return found


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", DOCKER / "prometheus.yml"), ("test", "rules", RULES_TEST)],
    ids=["configuration", "rules"],
)
def test_promtool_accepts_it(promtool: str, arguments: tuple[str, str, Path]) -> None:
    checked = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
