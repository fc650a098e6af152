"""Begins a trace for each HTTP request, or continues the client's trace (W3C `traceparent`)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.rpc import tracing

_POLLED = ("/api/v1/retrieve_future", "/api/v1/session_heartbeat", "/api/v1/healthz", "/metrics")
"""Paths with these beginnings are polled, and get no trace. The work that a poll waits for has a trace of its own."""


class Traces:
    """ASGI middleware that traces requests, for a gateway with --tracing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_POLLED):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = tracing.answer(f"{scope['method']} {scope['path']}", headers, **attributes)
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if (endpoint := scope.get("endpoint")) is not None:
                # Named by the endpoint, since a path may hold an id. Below a mount, an unknown path has the router as
                # its endpoint, which has no name.
                span.update_name(f"{scope['method']} {getattr(endpoint, '__name__', 'unknown')}")
            tracing.end(span, error=f"HTTP {status}" if status >= 500 else "")
