"""Telemetry of the SDK: accepted and thrown away unread, because it may hold API keys."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.codec import json_response


async def telemetry(request: Request) -> Response:
    return json_response({"status": "accepted"})


routes = [Route("/telemetry", telemetry, methods=["POST"])]
