"""A cache of rows that belong to live sessions, so that a sample or a batch costs no query."""

from __future__ import annotations

from typing import Generic, TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.connection import Database, Note
from gateway.database.tables.sessions import Model, SamplingSession, Session

_Row = TypeVar("_Row", Model, SamplingSession)


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
