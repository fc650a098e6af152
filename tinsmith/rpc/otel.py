"""The part of tracing.py that needs OpenTelemetry (the extra `otel`); imported once tracing is on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.re import parse_env_headers

_EXPORTERS = {"grpc": GrpcExporter, "http/protobuf": HttpExporter}
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_NAME, _VALUE = re.compile(r"[0-9a-z_.-]+"), re.compile(r"[ -~]*")
"""Names and values of metadata that gRPC can send."""


def provider(service: str, *, version: str) -> TracerProvider:
    """A provider that sends spans by OTLP. Raises ValueError for an OpenTelemetry variable whose value is not
    supported."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if exporter != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER: {exporter!r} is not supported; take 'otlp', or set no --tracing")
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    )
    if protocol not in _EXPORTERS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not one of {', '.join(_EXPORTERS)}")
    _check_headers()
    made = TracerProvider(resource=Resource.create({"service.name": service, "service.version": version}))
    made.add_span_processor(BatchSpanProcessor(_EXPORTERS[protocol]()))
    return made


def _check_headers() -> None:
    """Raises ValueError for headers that cannot be sent. The libraries would log the value, which may be a secret."""
    logging.getLogger("opentelemetry.util.re").disabled = True
    for variable in _HEADERS:
        for header in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
            parsed = parse_env_headers(header, liberal=True)  # empty for a header that it does not understand
            if not parsed or not all(_NAME.fullmatch(name) and _VALUE.fullmatch(parsed[name]) for name in parsed):
                raise ValueError(
                    f"{variable}: is not name=value,name=value in ASCII, with %2C for a comma in a value; "
                    "its value is not shown, because it may be a secret"
                )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Tracing:
    """OpenTelemetry's side of the functions of tracing.py, which describes the methods."""

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer("tinsmith")

    def current(self) -> Context | None:
        """See `tracing.current`. The span at that position may have ended already, because work that a request started
        may go on after its answer."""
        here = context.get_current()
        return here if trace.get_current_span(here).get_span_context().trace_flags.sampled else None

    def trace_id(self) -> str:
        found = trace.get_current_span().get_span_context()
        return trace.format_trace_id(found.trace_id) if found.is_valid else ""

    def follow(self, place: Context) -> None:
        context.attach(place)

    def span(self, name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[Span]:
        return self._tracer.start_as_current_span(name, attributes=_named(attributes))

    def record(self, name: str, place: Context, *, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        made = self._tracer.start_span(name, place, attributes=_named(attributes), start_time=_ns(start))
        made.end(_ns(end))

    def serve(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Span:
        made = self._tracer.start_span(
            name, propagate.extract(headers), kind=SpanKind.SERVER, attributes=dict(attributes)
        )
        # The context is never detached, because the task serves only this request.
        context.attach(trace.set_span_in_context(made))
        return made

    def call(self, method: str) -> tuple[Span, tuple[tuple[str, str], ...]]:
        made = self._tracer.start_span(method, kind=SpanKind.CLIENT, attributes={"rpc.system": "grpc"})
        headers: dict[str, str] = {}
        propagate.inject(headers, trace.set_span_in_context(made))
        return made, tuple(headers.items())

    def end(self, span: Span, *, error: str) -> None:
        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end()


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tinsmith.{name}": value for name, value in attributes.items()}
