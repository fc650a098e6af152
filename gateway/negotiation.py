"""Which form of an answer a client gets."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.body import off_loop
from gateway.config import GatewayConfig
from gateway.futures import JSON, PROTOBUF, Answer


async def negotiate(request: Request, answer: Answer, config: GatewayConfig) -> Response:
    """Protobuf for those whose Accept names it, and JSON for all others: SDKs before 0.18.1 read nothing else."""
    to_json = answer.as_json
    if to_json is None or PROTOBUF in request.headers.get("accept", "").lower():
        return Response(answer.body, media_type=answer.media_type)
    body = await off_loop(lambda: to_json(answer.body), num_bytes=len(answer.body), config=config)
    return Response(body, media_type=JSON)
