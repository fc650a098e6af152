"""A service's metrics over gRPC, for the gateway's dashboard, which can reach no other port of the service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry, generate_latest

from tinsmith.threads import in_pool_of
from tinsmith.v1 import metrics_pb2, metrics_pb2_grpc

_SCRAPING = ThreadPoolExecutor(1, thread_name_prefix="scraping")
"""The thread that collects metrics. It is apart from other threads, because a gauge that asks a disk for its free space
may hang as long as the disk does."""


class MetricsServicer(metrics_pb2_grpc.MetricsServiceServicer):
    """Answers with the metrics of one registry, in Prometheus' text format."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def GetMetrics(
        self, request: metrics_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> metrics_pb2.GetMetricsResponse:
        exposition = await in_pool_of(_SCRAPING, generate_latest, self._registry)
        return metrics_pb2.GetMetricsResponse(exposition=exposition.decode())
