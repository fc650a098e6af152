"""Rows of sessions: their owners, whether they live, and their heartbeats. Rows that belong to live sessions are cached
(`Living`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

from cachetools import LRUCache
from sqlalchemy import bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.connection import Database, Note
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.database.write_behind import WriteBehind

_Row = TypeVar("_Row", Model, SamplingSession)

_MAX_WHOSE = 100_000
_PER_QUERY = 500
"""Most ids in one query, because databases limit its parameters."""


class Living(Generic[_Row]):
    """Caches the rows of one table that were asked for, while their sessions live."""

    def __init__(self, database: Database, table: type[_Row]) -> None:
        self._database = database
        self._table = table
        self._rows: dict[str, _Row] = {}
        self._num_changes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    async def get(self, key: str) -> _Row | None:
        """The row, from memory or else from the database; None for an unknown key. Rows of ended sessions are not
        cached."""
        if key in self._rows:
            return self._rows[key]
        return await self.get_newest(key)

    async def get_newest(self, key: str) -> _Row | None:
        """The row as it is in the database now, which replaces the cached one."""
        seen = self._num_changes
        async with self._database.begin() as db:
            row = await db.get(self._table, key)
            live = row is not None and await is_live(db, row.session_id)
        if row is not None and live and seen == self._num_changes:  # a change meanwhile may have made it stale
            self._rows[key] = row
        else:
            self._rows.pop(key, None)
        return row

    async def add(self, key: str, row: _Row, *, note: Note | None = None) -> bool:
        """Adds the row to the database, and caches it. Returns False if there is already a row with this key. `note`:
        called in the same transaction after the row is added, to read or write further rows."""
        seen, live = self._num_changes, False

        async def look(db: AsyncSession) -> None:
            nonlocal live
            live = await is_live(db, row.session_id)
            if note is not None:
                await note(db)

        if not await self._database.add_once(row, note=look):
            return False
        if live and seen == self._num_changes:
            self._rows[key] = row
        return True

    def forget(self, key: str) -> None:
        """Drops the row from memory. Must be called after the row in the database has changed."""
        self._num_changes += 1
        self._rows.pop(key, None)

    def session_ids(self) -> set[str]:
        """The sessions of the rows in memory."""
        return {row.session_id for row in self._rows.values()}

    def forget_sessions(self, session_ids: set[str]) -> None:
        self._num_changes += 1
        self._rows = {key: row for key, row in self._rows.items() if row.session_id not in session_ids}


async def is_live(db: AsyncSession, session_id: str) -> bool:
    """Whether the session exists and has not ended."""
    query = select(Session.session_id).where(Session.session_id == session_id, Session.ended_at.is_(None))
    return await db.scalar(query) is not None


class Whose(NamedTuple):
    """The owner and the key of a session, which never change."""

    owner: str
    key_id: str
    """Id of the key that made the session."""


class SessionRows:
    def __init__(self, database: Database, *, of_sessions: Sequence[Living[Model] | Living[SamplingSession]]) -> None:
        """`of_sessions`: caches of rows that belong to sessions; they forget the rows of a session that ends."""
        self._database = database
        self._of_sessions = of_sessions
        self._living: set[str] = set()
        """Live sessions among those that were made or asked for at this gateway."""
        self._beats: dict[str, float] = {}
        self.heartbeats = WriteBehind(self._write_beats, what="heartbeats of sessions")
        self._whose: LRUCache[str, Whose] = LRUCache(_MAX_WHOSE)

    async def create(self, *, owner: str, key_id: str = "", idempotency_key: str | None, **facts: Any) -> Session:
        """A new session; when the owner repeats the `idempotency_key`, the session that was made with it."""
        now = time.time()
        session = Session(
            session_id=uuid4().hex,
            owner=owner,
            key_id=key_id,
            idempotency_key=idempotency_key,
            created_at=now,
            last_seen_at=now,
            **facts,
        )
        if await self._database.add_once(session):
            self._know(session)
            self._living.add(session.session_id)
            return session
        known = await self.of_key(owner, idempotency_key)
        assert known is not None
        return known

    async def count(self, *, owner: str | None = None) -> int:
        """Number of sessions that have not ended. `owner` None: of all owners."""
        query = select(func.count()).where(Session.ended_at.is_(None))
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._database.begin() as db:
            return await db.scalar(query) or 0

    async def of_key(self, owner: str, idempotency_key: str | None) -> Session | None:
        """The session that the owner made with this key; None when there is none."""
        if idempotency_key is None:
            return None
        query = select(Session).where(Session.owner == owner, Session.idempotency_key == idempotency_key)
        async with self._database.begin() as db:
            return (await db.scalars(query)).one_or_none()

    async def get(self, session_id: str) -> Session | None:
        async with self._database.begin() as db:
            return await db.get(Session, session_id)

    async def whose(self, session_id: str) -> Whose | None:
        """Owner and key of the session; None for an unknown one."""
        if session_id not in self._whose:
            session = await self.get(session_id)
            if session is None:
                return None
            self._know(session)
        return self._whose.get(session_id)

    def _know(self, session: Session) -> None:
        self._whose[session.session_id] = Whose(session.owner, session.key_id)

    def known_whose(self, session_id: str) -> Whose | None:
        """Owner and key of the session if they are in memory, as they are after `whose`; else None."""
        return self._whose.get(session_id)

    async def lives(self, session_id: str) -> bool:
        """Whether the session lives. Only the first call costs a query.

        An end at another gateway is noticed with the next `forget_ended`.
        """
        if session_id not in self._living:
            async with self._database.begin() as db:
                if not await is_live(db, session_id):
                    return False
            self._living.add(session_id)
        return True

    async def heartbeat(self, session_id: str) -> bool:
        """Notes a heartbeat. False when the session does not live.

        `_write_beats` writes those of all sessions together later, so a heartbeat does not wait for the disk.
        """
        if await self.lives(session_id):
            self._beats[session_id] = time.time()
            return True
        return False

    async def _write_beats(self) -> None:
        if not self._beats:
            return
        beats, self._beats = self._beats, {}
        rows = [{"id": session_id, "at": at} for session_id, at in sorted(beats.items())]
        session = Session.__table__.c
        query = update(Session.__table__).where(session.session_id == bindparam("id"))  # type: ignore[arg-type]
        try:
            async with self._database.begin() as db:
                await db.execute(query.values(last_seen_at=bindparam("at")), rows)
        except BaseException:
            self._beats = beats | self._beats
            raise

    async def end(self, session_id: str, *, reason: str, detail: str | None) -> bool:
        """Ends the session. False, and nothing is changed, when it has ended before or is unknown."""
        live = update(Session).where(Session.session_id == session_id, Session.ended_at.is_(None))
        try:
            async with self._database.begin() as db:
                result = await db.execute(live.values(ended_at=time.time(), end_reason=reason, end_detail=detail))
                return result.rowcount > 0  # type: ignore[attr-defined]
        finally:
            self._forget({session_id})  # also after an error: a commit whose connection was lost may have succeeded

    def _forget(self, session_ids: set[str]) -> None:
        self._living -= session_ids
        for living in self._of_sessions:
            living.forget_sessions(session_ids)

    async def forget_ended(self) -> set[str]:
        """Sessions that this gateway took for live and that another gateway has ended. They are forgotten here."""
        known = sorted(self._living.union(*(living.session_ids() for living in self._of_sessions)))
        ended: set[str] = set()
        for start in range(0, len(known), _PER_QUERY):
            some = Session.session_id.in_(known[start : start + _PER_QUERY])
            async with self._database.begin() as db:
                ended.update(await db.scalars(select(Session.session_id).where(some, Session.ended_at.is_not(None))))
        if ended:
            self._forget(ended)
        return ended

    async def assign_project(self, session_id: str, project_id: str) -> None:
        async with self._database.begin() as db:
            await db.execute(update(Session).where(Session.session_id == session_id).values(project_id=project_id))

    async def silent(self, *, seen_before: float) -> list[str]:
        """Live sessions whose last heartbeat came before this time, in seconds since 1970."""
        query = select(Session.session_id).where(Session.ended_at.is_(None), Session.last_seen_at < seen_before)
        async with self._database.begin() as db:
            return list(await db.scalars(query))
