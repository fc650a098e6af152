"""Sessions: creating, keeping alive, ending, listing and searching them."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import schemas
from gateway.codec import caller_of, gateway_of, idempotency_key, json_response, owner_of, parse, read_json
from gateway.database.tables.sessions import Session
from gateway.http.routes.runs import owner_in_scope
from gateway.views import session_view, time_text
from tinsmith import __version__
from tinsmith.errors import OutOfCapacity


async def create_session(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.CreateSession, content)
    owner, key = owner_of(request), idempotency_key(request)
    limit = gateway.config.max_sessions
    is_full = await gateway.store.sessions.count(owner=owner) >= limit
    if is_full and await gateway.store.sessions.of_key(owner, key) is None:
        raise OutOfCapacity(f"{limit} sessions of this key have not ended, and max_sessions is {limit}; end some first")
    session = await gateway.store.sessions.create(
        owner=owner,
        key_id=caller_of(request).key_id,
        idempotency_key=key,
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
            "info_message": f"connected to Tinsmith {__version__}. The loss stable_reinforce and the optimizer dimuon "
            "are Tinsmith's own definitions: docs/algorithms.md",
        }
    )


async def session_heartbeat(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.SessionHeartbeat, content)
    is_own = await gateway.tenants.access.owns(body.session_id, caller_of(request))
    if is_own and await gateway.store.sessions.heartbeat(body.session_id):
        return json_response({"type": "session_heartbeat"})
    session = await gateway.tenants.access.session(body.session_id, caller_of(request))
    if session is None:
        raise HTTPException(404, f"session_id: there is no session {body.session_id!r}")
    raise HTTPException(410, f"session {body.session_id} has ended: {session.end_reason}")


async def finish_session(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    body = parse(schemas.FinishSession, content)
    session_id = request.path_params["session_id"]
    if await gateway.tenants.access.session(session_id, caller_of(request)) is None:
        raise HTTPException(404, f"there is no session {session_id!r}")
    await gateway.reaper.end_session(session_id, reason=body.reason.type, detail=body.detail)
    return json_response({})


async def list_sessions(request: Request) -> Response:
    query = parse(schemas.SessionsQuery, dict(request.query_params))
    ids = await gateway_of(request).session_search.ids(
        owner=owner_in_scope(request, query), limit=query.limit, offset=query.offset
    )
    return json_response({"sessions": ids})


async def _find(request: Request) -> Session:
    session_id = request.path_params["session_id"]
    session = await gateway_of(request).tenants.access.session(session_id, caller_of(request))
    if session is None:
        raise HTTPException(404, f"session_id: there is no session {session_id!r}")
    return session


async def get_session(request: Request) -> Response:
    owner = owner_in_scope(request, parse(schemas.ScopedQuery, dict(request.query_params)))
    session = await _find(request)
    if owner is not None and session.owner != owner:
        raise HTTPException(404, f"session_id: {session.session_id!r} is another user's; access_scope=accessible")
    runs, samplers = await gateway_of(request).session_search.members(session.session_id)
    return json_response(
        {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": session.user_metadata or None,
            "display_name": session.display_name,
        }
    )


async def search_sessions(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    asked = parse(schemas.SearchSessions, content)
    found, last = await gateway.session_search.search(asked, caller=caller_of(request))
    sessions = [
        session_view(one.session, num_checkpoints=one.num_checkpoints, num_bytes=one.num_bytes) for one in found
    ]
    cursor = None
    if last is not None:
        cursor = {"last_created_at": time_text(last.created_at), "last_session_id": last.session_id}
    return json_response({"sessions": sessions, "next_cursor": cursor})


async def assign_project(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    project_id = parse(schemas.AssignProject, content).project_id
    session = await _find(request)
    if session.project_id != project_id:
        await gateway.store.sessions.assign_project(session.session_id, project_id)
        gateway.ledger.audit(
            "project_assign",
            owner=owner_of(request),
            category="projects",
            session_id=session.session_id,
            project_id=project_id,
            previous_project_id=session.project_id,
        )
    return json_response({})


async def trace_export(request: Request) -> Response:
    """The signed URL of a session's timeline. It is always ready, because the file is made during the download."""
    session = await _find(request)
    download = gateway_of(request).storage.downloads.sign(request, "traces", session.session_id)
    return json_response({"status": "ready", "url": download.url})


routes = [
    Route("/create_session", create_session, methods=["POST"]),
    Route("/session_heartbeat", session_heartbeat, methods=["POST"]),
    Route("/sessions", list_sessions),
    Route("/sessions/search", search_sessions, methods=["POST"]),
    Route("/sessions/{session_id}", get_session),
    Route("/sessions/{session_id}/finish", finish_session, methods=["POST"]),
    Route("/sessions/{session_id}/project", assign_project, methods=["PUT"]),
    Route("/sessions/{session_id}/trace_export", trace_export),
]
