"""Prometheus metrics. Each process has one registry, which it serves on a port of its own; the gateway serves /metrics
on its HTTP port."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from tinsmith import __version__

logger = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PHASE_BUCKETS_S = (0.0001, 0.0003, *LATENCY_BUCKETS_S[:9])
"""Buckets for the phases of a step, in seconds."""


@dataclass(frozen=True, slots=True)
class Declare:
    """Declares the metrics of one service, each with its labels. Every name begins with `service` and an underscore."""

    service: str
    registry: CollectorRegistry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.service}_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{self.service}_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{self.service}_{name}", text, labels, registry=self.registry, buckets=buckets)

    def seconds(self, name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS_S) -> Histogram:
        """A histogram of durations, whose name ends with _seconds."""
        return self.histogram(f"{name}_seconds", text, *labels, buckets=buckets)


def new_registry() -> CollectorRegistry:
    """A registry with the metrics of the process. prometheus_client's global registry is not used, so that one test
    process can hold several services."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    Info("tinsmith_build", "The version that runs.", registry=registry).info({"version": __version__})
    return registry


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves /metrics from a thread. Does nothing for port 0."""
    if port:
        start_http_server(port, host, registry)
        logger.info("metrics on http://%s:%d/metrics", host, port)
