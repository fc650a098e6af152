"""The requests that may have killed samplers, in the database.

A client sends its samples again after a restart of the gateway, or to a gateway that takes over. Such a request has
another id and the same content, by which its deaths are found again.
"""

from __future__ import annotations

import logging
import time

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from gateway.database.outages import log_failure
from gateway.database.store import Store
from gateway.database.tables.samples import SuspectRow
from gateway.database.write_behind import WriteBehind
from gateway.sampling.lives import Suspicion

logger = logging.getLogger(__name__)

KEPT_S = 3600.0
"""For this long after its last death, a request that has not been answered stays a suspect."""
_MOST = 10_000
"""Most suspects; the newest stay."""


class Suspects:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, SuspectRow] = {}
        """Suspects by their content, the oldest first."""
        self._changed: dict[str, SuspectRow | None] = {}
        """What the database does not have yet; None for a request that was answered."""
        self.behind = WriteBehind(self._write, what="the deaths of samplers")

    @property
    def are_none(self) -> bool:
        """Whether no request is a suspect."""
        return not self._known

    async def read(self) -> None:
        """Takes up what a gateway before this one, or another one, has written. Raises SQLAlchemyError."""
        query = select(SuspectRow).where(SuspectRow.died_at > time.time() - KEPT_S).order_by(SuspectRow.died_at)
        found: dict[str, SuspectRow | None] = {row.content: row for row in await self._store.all(query)}
        found |= self._changed
        self._known = {content: row for content, row in found.items() if row is not None}

    def find(self, content: str) -> Suspicion:
        """The deaths of a request with this content."""
        for old in [known for known, row in self._known.items() if row.died_at <= time.time() - KEPT_S]:
            del self._known[old]
        row = self._known.get(content)
        return Suspicion() if row is None else Suspicion(row.deaths, row.is_condemned)

    async def note(self, content: str, mine: Suspicion) -> None:
        """Writes the request's deaths into the database, before another sampler gets it."""
        self._known.pop(content, None)
        row = SuspectRow(content=content, deaths=mine.deaths, is_condemned=mine.is_condemned, died_at=time.time())
        self._known[content] = self._changed[content] = row
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        try:
            await self.behind.flush()
        except SQLAlchemyError as error:
            log_failure("the death of a sampler cannot be written", error, by=logger)

    def acquit(self, content: str) -> None:
        """Forgets the deaths of a request that was answered."""
        if self._known.pop(content, None) is not None:
            self._changed[content] = None

    async def _write(self) -> None:
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        try:
            async with self._store.begin() as db:
                for content, row in changed.items():
                    if row is not None:
                        await db.merge(row)
                    elif (left := await db.get(SuspectRow, content)) is not None:
                        await db.delete(left)
            await self._store.delete_old(SuspectRow.died_at, before=time.time() - KEPT_S, keep_newest=_MOST)
        except SQLAlchemyError:
            self._changed = changed | self._changed
            raise
