"""The metrics of all services: named as Prometheus asks for, with bounded labels, and listed in docs/metrics.md.

`UPDATE_DOCS=1 pytest tests/unit/test_metrics.py` writes the tables there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import CollectorRegistry

from gateway.metrics import Metrics as GatewayMetrics
from sampler_service.metrics import SamplerMetrics
from tinsmith.rpc.metrics import new_registry
from trainer_service.metrics import KINDS
from trainer_service.metrics import Metrics as TrainerMetrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"

UNITS = {"seconds", "bytes", "tokens", "ratio", "nats"}
"""Base units, and the things that this service counts where nothing is measured."""
COUNTED = {
    "checkpoints",
    "futures",
    "length",
    "limit",
    "models",
    "requests",
    "samplers",
    "sequences",
    "sessions",
    "threads",
    "versions",
}
STATES = {
    "gateway_sampler_state",
    "gateway_trainer_up",
    "trainer_token_budget",
    "trainer_tokens_per_second",
    "tinsmith_build",
}
"""Metrics that are no number with a unit."""
LABELS = {
    "bucket",
    "engine",
    "error",
    "gateway_sampler_state",
    "kind",
    "loss_fn",
    "method",
    "applied",
    "outcome",
    "phase",
    "place",
    "reason",
    "route",
    "sampler",
    "state",
    "status",
    "store",
    "trainer",
    "volume",
}
"""Each has few values. Never among them: an id, an owner, a path, a message."""


@dataclass(frozen=True)
class Described:
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def described(registry: CollectorRegistry) -> list[Described]:
    """The metrics of a registry, in the order in which they were registered."""
    found = []
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", ()) if isinstance(collector, MetricWrapperBase) else ()
        for metric in collector.collect():
            labels = labels or tuple(dict.fromkeys(name for one in metric.samples for name in one.labels))
            name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
            if metric.type == "histogram":
                labels = tuple(label for label in labels if label != "le")
            kind = "gauge" if metric.type in ("info", "stateset") else metric.type
            found.append(Described(name, kind, labels, metric.documentation))
    return found


def registry_of(service: str) -> CollectorRegistry:
    registry = new_registry()
    match service:
        case "gateway":
            return GatewayMetrics().registry
        case "trainer":
            TrainerMetrics(registry)
        case "sampler":
            SamplerMetrics(registry)
    return registry


PROCESS = {metric.name for metric in described(new_registry())}
SERVICES = ("gateway", "trainer", "sampler")


def own(service: str) -> list[Described]:
    return [metric for metric in described(registry_of(service)) if metric.name not in PROCESS]


def names(service: str) -> set[str]:
    """Names of all time series, as a query writes them."""
    found = set()
    for metric in described(registry_of(service)):
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.name + suffix for suffix in suffixes}
    return found


@pytest.mark.parametrize("metric", [one for service in SERVICES for one in own(service)], ids=lambda one: one.name)
def test_a_metric_is_named_for_its_service_and_its_unit_and_says_what_it_is(metric: Described) -> None:
    assert metric.name.startswith(tuple(f"{service}_" for service in SERVICES))
    assert metric.text.endswith(".")
    last = metric.name.removesuffix("_total").rpartition("_")[2]
    if metric.kind == "counter":
        assert metric.name.endswith("_total")
    elif metric.kind == "histogram":
        assert last in UNITS | COUNTED
    else:
        assert last in UNITS | COUNTED or metric.name in STATES
        assert not metric.name.endswith("_total")
    assert not any(part in {"ms", "milliseconds", "mb", "gb", "percent"} for part in metric.name.split("_"))


@pytest.mark.parametrize("service", SERVICES)
def test_labels_are_from_a_fixed_set(service: str) -> None:
    used = {label for metric in own(service) for label in metric.labels}
    assert used <= LABELS


@pytest.mark.parametrize("service", SERVICES)
def test_the_process_is_among_them(service: str) -> None:
    assert {"process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"} <= names(service)
    assert "tinsmith_build_info" in names(service)


def test_operations_are_counted_from_nought_on() -> None:
    registry = registry_of("trainer")
    for kind in KINDS:
        for outcome in ("ok", "failed"):
            assert registry.get_sample_value("trainer_operations_total", {"kind": kind, "outcome": outcome}) == 0


def test_docs_show_all_of_them() -> None:
    parts = [_table(f"The {service}", own(service)) for service in SERVICES]
    wanted = "\n".join([*parts, _table("Every service: its process", described(new_registry()))])
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    shown, after = rest.split(END)
    if os.environ.get("UPDATE_DOCS"):
        DOCS.write_text(before + BEGIN + wanted + END + after)
    else:
        assert shown == wanted, "the tables are old: UPDATE_DOCS=1 pytest tests/unit/test_metrics.py writes them"


def _table(title: str, metrics: list[Described]) -> str:
    rows = [f"\n## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        meaning = metric.text.replace("|", "\\|")
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |")
    return "\n".join(rows) + "\n"
