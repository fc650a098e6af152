"""Sessions: creating, keeping alive, ending, listing and searching them."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from gateway import answers, schemas
from gateway.codec import Request
from gateway.database.tables.sessions import Session
from gateway.http.endpoint import GET, POST, PUT
from gateway.http.routes.runs import owner_in_scope
from gateway.views import session_view, time_text
from tinsmith import __version__
from tinsmith.errors import OutOfCapacity


async def create_session(request: Request, body: schemas.CreateSession) -> answers.training.CreatedSession:
    """A new session."""
    gateway = request.gateway
    owner, key = request.owner, request.idempotency_key
    limit = gateway.config.max_sessions
    is_full = await gateway.store.sessions.count(owner=owner) >= limit
    if is_full and await gateway.store.sessions.of_key(owner, key) is None:
        raise OutOfCapacity(f"{limit} sessions of this key have not ended, and max_sessions is {limit}; end some first")
    session = await gateway.store.sessions.create(
        owner=owner,
        key_id=request.caller.key_id,
        idempotency_key=key,
        project_id=body.project_id,
        display_name=body.display_name,
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=body.user_metadata or {},
    )
    return {
        "type": "create_session",
        "session_id": session.session_id,
        "info_message": f"connected to Tinsmith {__version__}. The loss stable_reinforce and the optimizer dimuon "
        "are Tinsmith's own definitions: docs/algorithms.md",
    }


async def session_heartbeat(request: Request, body: schemas.SessionHeartbeat) -> answers.training.Heartbeat:
    """Keep a session alive."""
    gateway = request.gateway
    is_own = await gateway.tenants.access.owns(body.session_id, request.caller)
    if is_own and await gateway.store.sessions.heartbeat(body.session_id):
        return {"type": "session_heartbeat"}
    session = await gateway.tenants.access.session(body.session_id, request.caller)
    if session is None:
        raise HTTPException(404, f"session_id: there is no session {body.session_id!r}")
    raise HTTPException(410, f"session {body.session_id} has ended: {session.end_reason}")


async def finish_session(request: Request, body: schemas.FinishSession) -> answers.service.Empty:
    """End a session."""
    gateway = request.gateway
    session_id = request.path_params["session_id"]
    if await gateway.tenants.access.session(session_id, request.caller) is None:
        raise HTTPException(404, f"there is no session {session_id!r}")
    await gateway.reaper.end_session(session_id, reason=body.reason.type, detail=body.detail)
    return {}


async def list_sessions(request: Request, query: schemas.SessionsQuery) -> answers.training.SessionIds:
    """Ids of sessions."""
    ids = await request.gateway.session_search.ids(
        owner=owner_in_scope(request, query), limit=query.limit, offset=query.offset
    )
    return {"sessions": ids}


async def _find(request: Request) -> Session:
    session_id = request.path_params["session_id"]
    session = await request.gateway.tenants.access.session(session_id, request.caller)
    if session is None:
        raise HTTPException(404, f"session_id: there is no session {session_id!r}")
    return session


async def get_session(request: Request, query: schemas.ScopedQuery) -> answers.training.SessionMembers:
    """Training runs and samplers of a session."""
    owner = owner_in_scope(request, query)
    session = await _find(request)
    if owner is not None and session.owner != owner:
        raise HTTPException(
            404, f"session_id: {session.session_id!r} is another user's; ask with access_scope=accessible"
        )
    runs, samplers = await request.gateway.session_search.members(session.session_id)
    return {
        "training_run_ids": runs,
        "sampler_ids": samplers,
        "user_metadata": session.user_metadata or None,
        "display_name": session.display_name,
    }


async def search_sessions(request: Request, body: schemas.SearchSessions) -> answers.training.SessionPage:
    """Search sessions."""
    found, last = await request.gateway.session_search.search(body, caller=request.caller)
    sessions = [
        session_view(one.session, num_checkpoints=one.num_checkpoints, num_bytes=one.num_bytes) for one in found
    ]
    cursor: answers.training.SessionCursor | None = None
    if last is not None:
        cursor = {"last_created_at": time_text(last.created_at), "last_session_id": last.session_id}
    return {"sessions": sessions, "next_cursor": cursor}


async def assign_project(request: Request, body: schemas.AssignProject) -> answers.service.Empty:
    """Put a session into a project."""
    gateway = request.gateway
    project_id = body.project_id
    session = await _find(request)
    if session.project_id != project_id:
        await gateway.store.sessions.assign_project(session.session_id, project_id)
        gateway.ledger.audit(
            "project_assign",
            owner=request.owner,
            category="projects",
            session_id=session.session_id,
            project_id=project_id,
            previous_project_id=session.project_id,
        )
    return {}


async def trace_export(request: Request) -> answers.records.TraceExport:
    """URL of a session's timeline.

    It is always ready, because the file is made during the download.
    """
    session = await _find(request)
    download = request.gateway.storage.downloads.sign(request, "traces", session.session_id)
    return {"status": "ready", "url": download.url}


routes = [
    POST("/create_session", create_session),
    POST("/session_heartbeat", session_heartbeat, errors=(404, 410)),
    GET("/sessions", list_sessions, errors=(400,)),
    POST("/sessions/search", search_sessions),
    GET("/sessions/{session_id}", get_session, errors=(400, 404)),
    POST("/sessions/{session_id}/finish", finish_session, errors=(404,)),
    PUT("/sessions/{session_id}/project", assign_project, errors=(404,)),
    GET("/sessions/{session_id}/trace_export", trace_export, errors=(404,)),
]
