"""A collector of OpenTelemetry traces, and a stack that sends its own there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.left_sockets import allow_left_sockets, close_left_sockets  # noqa: F401 - a fixture
from tests.support.stack import Stack

BASE_MODEL = "tests/tiny"


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        with self.changed:
            for resource in request.resource_spans:
                service = {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"]
                self._spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, *names: tuple[str, str]) -> list[Span]:
        """All spans of a trace, once those of these services and names have come."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self.changed:
            there = self.changed.wait_for(
                lambda: set(names) <= {(span.service, span.name) for span in found()}, timeout=60
            )
            spans = found()
        have = {(span.service, span.name) for span in spans}
        assert there, f"missing: {set(names) - have}; there are {have}"
        return spans

    @property
    def spans(self) -> list[Span]:
        with self.changed:
            return list(self._spans)

    def close(self) -> None:
        self._server.stop(None).wait()


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="session")
def stack(collector: Collector, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "GATEWAY_LONG_POLL_S": "2",
    }
    flags = ["--tracing", "--log-format", "text"]
    state_dir = tmp_path_factory.mktemp("stack")
    with Stack(state_dir, base_models=[f"{BASE_MODEL}={toy}"], flags=flags, env=env) as stack:
        yield stack
