"""Rows of sampling sessions, of the clients that join them, and of each client's progress."""

from __future__ import annotations

import math
import time

from cachetools import LRUCache
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.connection import Database
from gateway.database.operations import settle
from gateway.database.sessions import Living
from gateway.database.tables.samples import SampleMark
from gateway.database.tables.sessions import SamplingSession, Session

_COUNTED_S = 60.0
"""How long a count of sampling sessions is used before they are counted again."""
_FULL_S = 1.0
"""How long a count is used that has reached the limit."""
_MAX_UNMARKED = 4096


class SamplerRows:
    def __init__(self, database: Database, living: Living[SamplingSession]) -> None:
        self._database = database
        self._living = living
        self._counted: dict[str, tuple[float, int]] = {}
        """owner -> time of the last count on the monotonic clock, and the number, including those made here since."""
        self._unmarked: LRUCache[str, None] = LRUCache(_MAX_UNMARKED)
        """Sampling sessions that were made here and have no mark yet; `mark` does not ask the database for them."""

    async def take_place(self, owner: str, *, limit: int) -> bool:
        """Counts one more sampling session of the owner. False, and nothing is counted, when the limit is reached.

        Sampling sessions of ended sessions count until they are forgotten.
        """
        counted_at, number = self._counted.get(owner, (-math.inf, 0))
        if time.monotonic() - counted_at > (_COUNTED_S if number < limit else _FULL_S):
            counted_at = time.monotonic()
            query = select(func.count(SamplingSession.sampling_session_id)).join(Session).where(Session.owner == owner)
            async with self._database.begin() as db:
                number = await db.scalar(query) or 0
        if is_free := number < limit:
            number += 1
        self._counted[owner] = counted_at, number
        return is_free

    async def add(self, row: SamplingSession, *, settles: str | None = None) -> SamplingSession:
        """Adds the row and returns it. Returns the existing one when its id exists already.

        `settles`: the request that has made the row. It is settled in the same transaction, unless the row exists.
        """

        async def note(db: AsyncSession) -> None:
            if settles is not None:
                await settle(db, settles)

        if await self._living.add(row.sampling_session_id, row, note=note):
            if not self._database.is_shared:
                self._unmarked[row.sampling_session_id] = None
            return row
        async with self._database.begin() as db:
            return await db.get_one(SamplingSession, row.sampling_session_id)

    async def get(self, sampling_session_id: str) -> SamplingSession | None:
        """The sampling session; None for an unknown id."""
        return await self._living.get(sampling_session_id)

    def lives(self, sampling_session_id: str) -> bool:
        """Whether the session of this sampling session lives. Only right after `get`, which loads it into memory."""
        return sampling_session_id in self._living

    async def join(self, sampling_session_id: str) -> int:
        """A number for a new client, from 1 on, that no other client of the sampling session has."""
        row = update(SamplingSession).where(SamplingSession.sampling_session_id == sampling_session_id)
        query = row.values(num_joined=SamplingSession.num_joined + 1).returning(SamplingSession.num_joined)
        async with self._database.begin() as db:
            return (await db.scalars(query)).one()

    async def mark(self, sampling_session_id: str, clone_id: int) -> SampleMark | None:
        if sampling_session_id in self._unmarked:
            return None
        async with self._database.begin() as db:
            return await db.get(SampleMark, (sampling_session_id, clone_id))

    async def put_mark(self, mark: SampleMark, *, home: str | None) -> bool:
        """Stores the progress of a client. False, and nothing is stored, when another gateway is the samples' home.

        `home`: this gateway's id; None when it is the only one.
        """
        self._unmarked.pop(mark.sampling_session_id, None)
        values = {"low": mark.low, "high": mark.high}
        key = {"sampling_session_id": mark.sampling_session_id, "clone_id": mark.clone_id}
        query = self._database.insert(SampleMark).values(**key, **values, home=home)
        query = query.on_conflict_do_update(
            index_elements=list(key), set_=values, where=None if home is None else SampleMark.home == home
        )
        async with self._database.begin() as db:
            return (await db.scalars(query.returning(SampleMark.low))).one_or_none() is not None
