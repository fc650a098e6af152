"""Telemetry of the SDK: accepted and thrown away unread, because it may hold API keys."""

from __future__ import annotations

from gateway import answers
from gateway.codec import Request
from gateway.http.endpoint import POST


async def telemetry(request: Request) -> answers.service.Accepted:
    """Accepted and thrown away unread."""
    return {"status": "accepted"}


routes = [POST("/telemetry", telemetry)]
