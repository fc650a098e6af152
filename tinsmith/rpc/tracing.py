"""OpenTelemetry traces, from the HTTP request through gRPC to the compute threads. Off unless `setup` is called.

While tracing is off, OpenTelemetry is not imported, and each function here costs one comparison. A span is made only
within a sampled trace. Polls, health checks and background tasks begin no trace.

One setting turns tracing on. OpenTelemetry's own environment variables, such as OTEL_EXPORTER_OTLP_ENDPOINT and
OTEL_TRACES_SAMPLER, configure everything else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tinsmith import __version__
from tinsmith.rpc import logs

_FLUSH_S = 2.0
_HEALTH = "/grpc.health."
_OFF = nullcontext()

_otel: Any = None
"""An `otel.Tracing` once tracing is on."""


def setup(service: str) -> None:
    """Turns tracing on. To be called once, as a service starts, before anything connects. Raises SystemExit if
    packages are missing or a variable has a value that is not supported."""
    global _otel
    try:
        from tinsmith.rpc import otel
    except ImportError as error:
        raise SystemExit(
            f"tracing: needs packages that are not installed ({error}); pip install 'tinsmith[otel]', or leave it off"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME") or f"tinsmith-{service}"
    try:
        _otel = otel.Tracing(otel.provider(name, version=__version__))
    except ValueError as error:
        raise SystemExit(f"tracing: {error}") from None
    logs.set_trace_id(_otel.trace_id)


def shutdown() -> None:
    """Sends the remaining spans, for at most two seconds. A collector that does not answer must not delay the stop of
    the service."""
    if _otel is not None:
        sending = threading.Thread(target=_otel.provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


def is_on() -> bool:
    return _otel is not None


def current() -> Any:
    """The present task's position in a trace, for `record` and `follow`; None outside of a sampled trace."""
    return None if _otel is None else _otel.current()


def follow(place: Any) -> None:
    """Puts the present task at a position of a trace, which `current` has returned. Does nothing for None."""
    if place is not None:
        _otel.follow(place)


def span(name: str, **attributes: str | float) -> AbstractContextManager[Any]:
    """Records the block as a span of the present trace, if there is one."""
    if _otel is None or _otel.current() is None:
        return _OFF
    return _otel.span(name, attributes)


def record(name: str, place: Any, *, start: float, end: float, **attributes: str | float) -> None:
    """Records a span that is over already, below `place`, a position of a trace. Does nothing if `place` is None.
    `start`, `end`: in seconds since 1970."""
    if place is not None:
        _otel.record(name, place, start=start, end=end, attributes=attributes)


def answer(name: str, headers: Mapping[str, str], **attributes: str) -> Any:
    """Begins the span of an HTTP request, in the trace that its header `traceparent` names, else in a new trace. The
    present task is within the span from now on. Returns the span, for `end`; None while tracing is off.
    """
    return None if _otel is None else _otel.serve(name, headers, attributes)


def serve(method: str, metadata: Iterable[tuple[str, Any]] | None) -> Any:
    """Begins the span of a gRPC call that has arrived, as `answer` does for HTTP. None if the call names no trace."""
    if _otel is None:
        return None
    headers = {key: value for key, value in metadata or () if isinstance(value, str)}
    return _otel.serve(method, headers, {"rpc.system": "grpc"}) if "traceparent" in headers else None


def call(method: str) -> tuple[Any, tuple[tuple[str, str], ...]] | None:
    """Begins the span of a gRPC call that is about to be made. Returns the span, which `end` ends, and the metadata
    that names its trace to the other side. None outside of a trace, and for health checks.
    """
    if _otel is None or method.startswith(_HEALTH) or _otel.current() is None:
        return None
    return _otel.call(method)


def end(span: Any, *, error: str = "") -> None:
    """Ends a span that `answer`, `serve` or `call` has returned. Does nothing for None."""
    if span is not None:
        _otel.end(span, error=error)
