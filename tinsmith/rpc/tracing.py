"""OpenTelemetry traces, from the HTTP request through gRPC to what the compute threads do. Off without `setup`.

While it is off nothing of OpenTelemetry is imported, and each function here is one comparison. A span is made within a
trace that is sampled, and nowhere else: polls, health checks and background tasks begin none.

Everything but the one setting is by OpenTelemetry's own environment variables, such as OTEL_EXPORTER_OTLP_ENDPOINT and
OTEL_TRACES_SAMPLER.
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
"""_Tracing once it is on."""


def setup(service: str) -> None:
    """Called once, in a service's __main__, before anything connects. Raises SystemExit when it cannot be."""
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
    """Sends what is left, for two seconds at most: a collector that does not answer holds up no stop."""
    if _otel is not None:
        sending = threading.Thread(target=_otel.provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


def is_on() -> bool:
    return _otel is not None


def current() -> Any:
    """The place in a trace that this task is at, for `record` and `follow`; None outside of a sampled trace."""
    return None if _otel is None else _otel.current()


def follow(place: Any) -> None:
    """From now on this task is at that place of a trace."""
    if place is not None:
        _otel.follow(place)


def span(name: str, **attributes: str | float) -> AbstractContextManager[Any]:
    """What goes on in the block is a part of the present trace, if there is one."""
    if _otel is None or _otel.current() is None:
        return _OFF
    return _otel.span(name, attributes)


def record(name: str, place: Any, *, start: float, end: float, **attributes: str | float) -> None:
    """A part that is over, of the trace at `place`; nothing where that is None. Times in seconds since 1970."""
    if place is not None:
        _otel.record(name, place, start=start, end=end, attributes=attributes)


def answer(name: str, headers: Mapping[str, str], **attributes: str) -> Any:
    """An HTTP request: a new trace, or a part of the one that its `traceparent` names. To be ended by `end`.

    This task is in it from now on. None while tracing is off.
    """
    return None if _otel is None else _otel.serve(name, headers, attributes)


def serve(method: str, metadata: Iterable[tuple[str, Any]] | None) -> Any:
    """A call that came over gRPC, if it says which trace it belongs to; else None. As `answer`."""
    if _otel is None:
        return None
    headers = {key: value for key, value in metadata or () if isinstance(value, str)}
    return _otel.serve(method, headers, {"rpc.system": "grpc"}) if "traceparent" in headers else None


def call(method: str) -> tuple[Any, tuple[tuple[str, str], ...]] | None:
    """A call that is about to be made over gRPC: its span, to be ended, and the metadata that tells of it.

    None outside of a trace, and for health checks.
    """
    if _otel is None or method.startswith(_HEALTH) or _otel.current() is None:
        return None
    return _otel.call(method)


def end(span: Any, *, error: str = "") -> None:
    """Of a span that `answer`, `serve` or `call` has given, if it has."""
    if span is not None:
        _otel.end(span, error=error)
