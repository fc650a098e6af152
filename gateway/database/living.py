"""Rows that never change while their session lives, kept in memory, so that a sample or a batch costs no query."""

from __future__ import annotations

from typing import Generic, TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.connection import Database
from gateway.database.tables.sessions import Model, SamplingSession, Session

_Row = TypeVar("_Row", Model, SamplingSession)


class Living(Generic[_Row]):
    """The rows of one table that belong to living sessions and that were asked for."""

    def __init__(self, database: Database, table: type[_Row]) -> None:
        self._database = database
        self._table = table
        self._rows: dict[str, _Row] = {}
        self._num_changes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    async def get(self, key: str) -> _Row | None:
        """The row, from memory or from the database; None for an unknown one. Those of ended sessions are not kept."""
        if key in self._rows:
            return self._rows[key]
        return await self.get_newest(key)

    async def get_newest(self, key: str) -> _Row | None:
        """The row as the database has it now."""
        seen = self._num_changes
        async with self._database.begin() as db:
            row = await db.get(self._table, key)
            live = row is not None and await is_live(db, row.session_id)
        if row is not None and live and seen == self._num_changes:  # after a change the row that was read may be old
            self._rows[key] = row
        else:
            self._rows.pop(key, None)
        return row

    def forget(self, key: str) -> None:
        """Drops the kept row, because the database's has changed."""
        self._num_changes += 1
        self._rows.pop(key, None)

    def session_ids(self) -> set[str]:
        """Sessions of which a row is kept."""
        return {row.session_id for row in self._rows.values()}

    def forget_sessions(self, session_ids: set[str]) -> None:
        self._num_changes += 1
        self._rows = {key: row for key, row in self._rows.items() if row.session_id not in session_ids}


async def is_live(db: AsyncSession, session_id: str) -> bool:
    """The session is known and has not ended."""
    query = select(Session.session_id).where(Session.session_id == session_id, Session.ended_at.is_(None))
    return await db.scalar(query) is not None
