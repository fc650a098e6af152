"""Sessions: whose they are, whether they live, and when they were last heard of."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import bindparam, func, select, update

from gateway.database.connection import Database
from gateway.database.living import Living, is_live
from gateway.database.tables.sessions import Model, SamplingSession, Session

_MAX_WHOSE = 100_000
_PER_QUERY = 500
"""Ids in one query: databases limit its parameters."""


class Whose(NamedTuple):
    """To whom a session belongs, for ever."""

    owner: str
    key_id: str
    """Of the key that made it."""


class SessionRows:
    def __init__(self, database: Database, *, of_sessions: Sequence[Living[Model] | Living[SamplingSession]]) -> None:
        """`of_sessions`: what is kept in memory of living sessions, to be forgotten with them."""
        self._database = database
        self._of_sessions = of_sessions
        self._living: set[str] = set()
        """Sessions that live, of those that were made or asked for here."""
        self._beats: dict[str, float] = {}
        self._whose: OrderedDict[str, Whose] = OrderedDict()

    async def create(self, *, owner: str, key_id: str = "", idempotency_key: str | None, **facts: Any) -> Session:
        """A new session; the one made before when the same owner repeats the key. Its heartbeats cost no query."""
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
        """Those that have not ended; None: everybody's."""
        query = select(func.count()).where(Session.ended_at.is_(None))
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._database.begin() as db:
            return await db.scalar(query) or 0

    async def of_key(self, owner: str, idempotency_key: str | None) -> Session | None:
        """The session that the owner made with this key."""
        if idempotency_key is None:
            return None
        query = select(Session).where(Session.owner == owner, Session.idempotency_key == idempotency_key)
        async with self._database.begin() as db:
            return (await db.scalars(query)).one_or_none()

    async def get(self, session_id: str) -> Session | None:
        async with self._database.begin() as db:
            return await db.get(Session, session_id)

    async def whose(self, session_id: str) -> Whose | None:
        """None for an unknown session."""
        if session_id not in self._whose:
            session = await self.get(session_id)
            if session is None:
                return None
            self._know(session)
        return self._whose.get(session_id)

    def _know(self, session: Session) -> None:
        self._whose[session.session_id] = Whose(session.owner, session.key_id)
        if len(self._whose) > _MAX_WHOSE:
            self._whose.popitem(last=False)

    def known_whose(self, session_id: str) -> Whose | None:
        """None unless it is in memory, as it is soon after `whose`."""
        return self._whose.get(session_id)

    async def lives(self, session_id: str) -> bool:
        """Costs a query once. Of an end at another gateway it hears with `forget_ended`."""
        if session_id not in self._living:
            async with self._database.begin() as db:
                if not await is_live(db, session_id):
                    return False
            self._living.add(session_id)
        return True

    async def heartbeat(self, session_id: str) -> bool:
        """True when the session lives. It is written behind, all sessions at once: a heartbeat waits for no disk."""
        if await self.lives(session_id):
            self._beats[session_id] = time.time()
            return True
        return False

    async def write_heartbeats(self) -> None:
        beats, self._beats = self._beats, {}
        if not beats:
            return
        rows = [{"id": session_id, "at": at} for session_id, at in sorted(beats.items())]
        session = Session.__table__.c
        query = update(Session.__table__).where(session.session_id == bindparam("id"))  # type: ignore[arg-type]
        async with self._database.begin() as db:
            await db.execute(query.values(last_seen_at=bindparam("at")), rows)

    async def end(self, session_id: str, *, reason: str, detail: str | None) -> bool:
        """True for the first end; a later one changes nothing."""
        live = update(Session).where(Session.session_id == session_id, Session.ended_at.is_(None))
        try:
            async with self._database.begin() as db:
                result = await db.execute(live.values(ended_at=time.time(), end_reason=reason, end_detail=detail))
                return result.rowcount > 0  # type: ignore[attr-defined]
        finally:
            self._forget({session_id})  # it may have ended, too, when the connection was lost at the commit

    def _forget(self, session_ids: set[str]) -> None:
        self._living -= session_ids
        for living in self._of_sessions:
            living.forget_sessions(session_ids)

    async def forget_ended(self) -> set[str]:
        """Those that another gateway has ended and that were still known here."""
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
        query = select(Session.session_id).where(Session.ended_at.is_(None), Session.last_seen_at < seen_before)
        async with self._database.begin() as db:
            return list(await db.scalars(query))
