"""The life of a session."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import schemas
from gateway.body import parse, read_json
from gateway.errors import json_response
from gateway.gateway import gateway_of, owner_of
from tinsmith import __version__


async def create_session(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.CreateSession, content)
    session = await gateway.store.create_session(
        owner=owner_of(request),
        idempotency_key=request.headers.get("x-idempotency-key"),
        project_id=body.project_id,
        display_name=body.display_name,
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=body.user_metadata,
    )
    return json_response(
        {
            "type": "create_session",
            "session_id": session.session_id,
            "info_message": f"connected to Tinsmith {__version__}",
        }
    )


async def session_heartbeat(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.SessionHeartbeat, content)
    if await gateway.store.heartbeat(body.session_id):
        return json_response({"type": "session_heartbeat"})
    session = await gateway.store.session(body.session_id)
    if session is None:
        raise HTTPException(404, f"session_id: there is no session {body.session_id!r}")
    raise HTTPException(410, f"session {body.session_id} has ended: {session.end_reason}")


async def finish_session(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.FinishSession, content)
    session_id = request.path_params["session_id"]
    if await gateway.store.session(session_id) is None:
        raise HTTPException(404, f"there is no session {session_id!r}")
    await gateway.reaper.end_session(session_id, reason=body.reason.type, detail=body.detail)
    return json_response({})


routes = [
    Route("/create_session", create_session, methods=["POST"]),
    Route("/session_heartbeat", session_heartbeat, methods=["POST"]),
    Route("/sessions/{session_id}/finish", finish_session, methods=["POST"]),
]
