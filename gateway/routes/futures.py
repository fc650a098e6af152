"""Answers to what was submitted."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import schemas
from gateway.body import parse, read_json
from gateway.errors import json_response
from gateway.futures import Answer, Gone
from gateway.gateway import gateway_of
from gateway.negotiation import negotiate


async def retrieve_future(request: Request) -> Response:
    """The answer, or try_again after a long poll; 410 for an id that nobody knows."""
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    request_id = parse(schemas.RetrieveFuture, content).request_id
    timeout_s = gateway.config.long_poll_s
    try:
        try:
            found = await gateway.futures.poll(request_id, timeout_s=timeout_s)
        except Gone:
            await gateway.operations.attach(request_id)
            found = await gateway.futures.poll(request_id, timeout_s=timeout_s)
    except Gone:
        raise HTTPException(
            410, f"request_id: {request_id!r} is unknown, or its answer is no longer kept; submit the request again"
        ) from None
    if isinstance(found, Answer):
        return await negotiate(request, found, gateway.config)
    return json_response(
        {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": found.state,
            "queue_state_reason": found.reason,
        }
    )


routes = [Route("/retrieve_future", retrieve_future, methods=["POST"])]
