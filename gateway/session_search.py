"""Lists and searches of sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Text, and_, cast, false, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from gateway import schemas
from gateway.database.catalog import exists_now, in_project
from gateway.database.connection import all_of, parts
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.tenants.access import Caller
from gateway.views import FINISH_REASONS, owner_of_urn

_SCANNED_ROWS = 500
MAX_SCANNED = 10 * _SCANNED_ROWS
"""Most sessions that one search compares."""
_LOADED_ROWS = 50
"""Most sessions whose metadata is loaded at a time: each may have 64 Ki characters."""
_COMPARED = 1000
"""Most characters of metadata that the database compares, because it takes no long patterns."""


@dataclass(frozen=True, slots=True)
class Found:
    """A session, and the number and size of its checkpoints."""

    session: Session
    num_checkpoints: int
    num_bytes: int


class _Scanned(NamedTuple):
    """The part of a session that a search compares."""

    session_id: str
    created_at: float
    display_name: str | None
    fits: bool
    """Whether a session has one of the projects and statuses, and a part of the metadata, that are asked for."""


class SessionSearch:
    """Queries over sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ids(self, *, owner: str | None, limit: int, offset: int) -> list[str]:
        """Ids of sessions, newest first. `owner` None means the sessions of all owners."""
        query = select(Session.session_id).order_by(Session.created_at.desc(), Session.session_id.desc())
        if owner is not None:
            query = query.where(Session.owner == owner)
        return await self._store.all(query.limit(limit).offset(offset))

    async def members(self, session_id: str) -> tuple[list[str], list[str]]:
        """Ids of the session's training runs and of its sampling sessions, oldest first."""
        models = select(Model.model_id).where(Model.session_id == session_id).order_by(Model.created_at)
        samplers = select(SamplingSession.sampling_session_id).where(SamplingSession.session_id == session_id)
        async with self._store.begin() as db:
            return await all_of(db, models), await all_of(db, samplers.order_by(SamplingSession.created_at))

    async def search(
        self, asked: schemas.SearchSessions, *, caller: Caller
    ) -> tuple[list[Found], Session | _Scanned | None]:
        """One page of sessions, newest first, and the session after which the next page begins, or None if there is no
        next page.

        The search stops after MAX_SCANNED sessions. So a page may hold fewer sessions than were asked for, and still
        have a next page.
        """
        # The scan reads no tags and no metadata, because each may have 64 Ki characters of JSON, parsed on the event
        # loop. It reads tuples, because SQLAlchemy takes 25 us of the event loop to make an object.
        fits: list[ColumnElement[bool]] = []
        if asked.project_ids is not None:
            fits.append(or_(false(), *[in_project(project_id) for project_id in asked.project_ids]))
        if asked.statuses is not None:
            fits.append(or_(*[_has_status(status) for status in asked.statuses]))
        if asked.user_metadata:
            fits.append(_has_part(asked.user_metadata))
        # The condition is a column of the result. In WHERE, it would make a query go through all sessions of the owner
        # until enough fit.
        scanned = select(Session.session_id, Session.created_at, Session.display_name, and_(true(), *fits))
        query = scanned.order_by(Session.created_at.desc(), Session.session_id.desc())
        if not caller.admin:
            query = query.where(Session.owner == caller.owner)
        match asked.owner:
            case schemas.OwnSearch():
                query = query.where(Session.owner == caller.owner)
            case schemas.UserSearch(owner_urns=urns):
                query = query.where(Session.owner.in_([owner_of_urn(urn) for urn in urns]))
        if asked.session_id is not None and asked.display_name is None:
            query = query.where(Session.session_id == asked.session_id)
        matching: list[str] = []
        scanned_to: _Scanned | None = None
        is_cut = False
        async with self._store.begin() as db:
            after = await self._position(asked.cursor, caller=caller)
            # Names are compared here, because databases differ in which letters they lower.
            num_scanned = 0
            while len(matching) <= asked.limit and num_scanned < MAX_SCANNED:
                page = query if after is None else query.where(_comes_after(*after))
                rows = [_Scanned(*row) for row in await db.execute(page.limit(_SCANNED_ROWS))]
                num_scanned += len(rows)
                named = [row.session_id for row in rows if row.fits and _is_named(row, asked)]
                matching += await self._with_metadata(db, named, asked.user_metadata)
                if len(rows) < _SCANNED_ROWS:
                    break
                scanned_to = rows[-1]
                after = scanned_to.created_at, scanned_to.session_id
                await asyncio.sleep(0)
            else:
                is_cut = len(matching) <= asked.limit
            listed = select(Session).options(defer(Session.tags))
            found_rows = await all_of(db, listed.where(Session.session_id.in_(matching[: asked.limit])))
            by_id = {row.session_id: row for row in found_rows}
        page_rows = [by_id[session_id] for session_id in matching[: asked.limit] if session_id in by_id]
        sizes = await self._sizes([row.session_id for row in page_rows])
        found = [Found(row, *sizes.get(row.session_id, (0, 0))) for row in page_rows]
        if len(matching) > asked.limit and page_rows:
            return found, page_rows[-1]
        return found, scanned_to if is_cut else None

    async def _with_metadata(
        self, db: AsyncSession, session_ids: Sequence[str], wanted: Mapping[str, str]
    ) -> Sequence[str]:
        """The sessions whose metadata has these entries, in the same order."""
        if not wanted or not session_ids:
            return session_ids
        having: set[str] = set()
        for some in parts(session_ids, _LOADED_ROWS):
            query = select(Session.session_id, Session.user_metadata).where(Session.session_id.in_(some))
            rows: Any = await db.execute(query)
            having |= {row_id for row_id, has in rows if all(has.get(key) == value for key, value in wanted.items())}
        return [session_id for session_id in session_ids if session_id in having]

    async def _position(self, cursor: schemas.SearchCursor | None, *, caller: Caller) -> tuple[float, str] | None:
        if cursor is None:
            return None
        # The row has the exact time; the cursor's is rounded to a microsecond.
        session = await self._store.sessions.get(cursor.last_session_id)
        is_seen = session is not None and caller.sees(session.owner)
        at = session.created_at if session is not None and is_seen else cursor.last_created_at.timestamp()
        return at, cursor.last_session_id

    async def _sizes(self, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """session_id -> number and bytes of its checkpoints, for the sessions that have any."""
        query = (
            select(Model.session_id, func.count(), func.sum(Checkpoint.size_bytes))
            .join(Checkpoint, Checkpoint.run_id == Model.model_id)
            .where(Model.session_id.in_(session_ids), exists_now())
            .group_by(Model.session_id)
        )
        return {session_id: (count, int(size)) for session_id, count, size in await self._store.rows(query)}


def _comes_after(created_at: float, session_id: str) -> ColumnElement[bool]:
    """True for sessions that come later in the order newest first."""
    later = or_(Session.created_at < created_at, Session.session_id < session_id)
    return and_(Session.created_at <= created_at, later)  # in this form an index finds the first such session


def _has_part(wanted: Mapping[str, str]) -> ColumnElement[bool]:
    """Whether the text of a session's metadata has the longest of these entries. By this condition the database leaves
    out most sessions without all entries, at no cost for the event loop."""
    longest = max((json.dumps({key: value})[1:-1] for key, value in wanted.items()), key=len)
    return cast(Session.user_metadata, Text).contains(longest[:_COMPARED], autoescape=True)


def _has_status(status: schemas.StatusQuery) -> ColumnElement[bool]:
    match status:
        case schemas.ActiveQuery():
            return Session.ended_at.is_(None)
        case schemas.FinishedQuery(reasons=reasons):
            return Session.end_reason.in_(reasons or FINISH_REASONS)
    return Session.session_id.in_([])  # no session is ever cancelled here, or failed by a request


def _is_named(session: _Scanned, asked: schemas.SearchSessions) -> bool:
    """Whether the session has the name or the id that the search asks for, if it asks for a name."""
    if asked.display_name is None:
        return True  # the query compares the id
    if session.session_id == asked.session_id:
        return True
    name = (session.display_name or "").casefold()
    return all(word in name for word in asked.display_name.casefold().split())
