"""The requests that may have killed samplers, in the database.

A client sends its samples again after a restart of the gateway, or to a gateway that takes over. Such a request has
another id and the same content, by which its deaths are found again.
"""

from __future__ import annotations

import asyncio
import time

from sqlalchemy import case, delete, or_, select

from gateway.database.connection import parts
from gateway.database.store import Store
from gateway.database.tables.samples import SuspectRow
from gateway.database.write_behind import WriteBehind
from gateway.sampling.lives import Suspicion

KEPT_S = 3600.0
"""Time after its last death for which a request that has not been answered stays a suspect, in seconds."""
_MOST = 10_000
"""Most suspects; the newest stay."""
_WAIT_S = 2.0
"""Longest wait for the database, in seconds. A request goes on after that, and its deaths are written later."""


class Suspects:
    """Keeps the suspects in memory and in the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, SuspectRow] = {}
        """Suspects by their content, the oldest first."""
        self._changed: dict[str, SuspectRow | None] = {}
        """Rows that the database does not have yet, the oldest first; None for a request that was answered."""
        self._with_database = asyncio.Lock()
        """Held while rows are written or read, so that `read` misses no change."""
        self.behind = WriteBehind(self._write, what="the deaths of samplers")

    @property
    def are_none(self) -> bool:
        """Whether no request is a suspect."""
        return not self._known

    async def read(self) -> None:
        """Reads the suspects that other gateways, or this one before a restart, have written. Raises
        SQLAlchemyError."""
        query = select(SuspectRow).where(SuspectRow.died_at > time.time() - KEPT_S).order_by(SuspectRow.died_at)
        async with self._with_database:
            rows = await self._store.all(query)
            self._known = {row.content: row for row in rows if row.content not in self._changed}
            self._known |= {content: row for content, row in self._changed.items() if row is not None}

    def find(self, content: str) -> Suspicion:
        """The deaths of a request with this content."""
        now = time.time()
        while self._known and (oldest := next(iter(self._known.values()))).died_at <= now - KEPT_S:
            del self._known[oldest.content]
        row = self._known.get(content)
        return Suspicion() if row is None else Suspicion(row.deaths, row.is_condemned, ends_at=row.died_at + KEPT_S)

    async def note(self, content: str, mine: Suspicion) -> None:
        """Writes the request's deaths into the database, before another sampler gets it. Several requests in work may
        have this content."""
        known, now = self.find(content), time.time()
        mine.ends_at = now + KEPT_S
        row = SuspectRow(
            content=content,
            deaths=max(mine.deaths, known.deaths),
            is_condemned=mine.is_condemned or known.is_condemned,
            died_at=now,
        )
        self._known.pop(content, None)
        self._known[content] = row
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        self._change(content, row)
        await self.behind.hurry(_WAIT_S)

    def acquit(self, content: str) -> None:
        """Forgets the deaths of a request that was answered."""
        if self._known.pop(content, None) is not None:
            self._change(content, None)

    def _change(self, content: str, row: SuspectRow | None) -> None:
        self._changed.pop(content, None)
        self._changed[content] = row
        if len(self._changed) > _MOST:
            del self._changed[next(iter(self._changed))]

    async def _write(self) -> None:
        if not self._changed:
            return
        async with self._with_database:
            changed, old = self._changed.copy(), time.time() - KEPT_S
            # Both lists are sorted, so that all gateways lock rows in one order, without a deadlock.
            answered = sorted(content for content, row in changed.items() if row is None)
            rows = [
                {"content": content, "deaths": row.deaths, "is_condemned": row.is_condemned, "died_at": row.died_at}
                for content, row in sorted(changed.items())
                if row is not None
            ]
            adding = self._store.insert(SuspectRow)
            new = adding.excluded
            merged = {  # another gateway may have written a request with this content
                "deaths": case((new.deaths > SuspectRow.deaths, new.deaths), else_=SuspectRow.deaths),
                "is_condemned": or_(new.is_condemned, SuspectRow.is_condemned),
                "died_at": new.died_at,
            }
            async with self._store.begin() as db:
                await db.execute(delete(SuspectRow).where(SuspectRow.died_at <= old))
                for some in parts(answered):
                    await db.execute(delete(SuspectRow).where(SuspectRow.content.in_(some)))
                if rows:
                    await db.execute(adding.on_conflict_do_update(index_elements=["content"], set_=merged), rows)
            for content, row in changed.items():
                if content in self._changed and self._changed[content] is row:  # the row has not changed meanwhile
                    del self._changed[content]
        await self._store.delete_old(SuspectRow.died_at, before=old, keep_newest=_MOST)
