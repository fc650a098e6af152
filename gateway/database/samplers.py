"""Sampling sessions, the clients that join them, and how far each client's samples have come."""

from __future__ import annotations

import math
import time

from sqlalchemy import func, select, update

from gateway.database.connection import Database
from gateway.database.living import Living
from gateway.database.tables.samples import SampleMark
from gateway.database.tables.sessions import SamplingSession, Session

_COUNTED_S = 60.0
"""How long a number of sampling sessions is believed."""
_FULL_S = 1.0
"""How long it is believed when it leaves no room."""


class SamplerRows:
    def __init__(self, database: Database, living: Living[SamplingSession]) -> None:
        self._database = database
        self._living = living
        self._counted: dict[str, tuple[float, int]] = {}
        """By owner: when its sampling sessions were counted, and how many there are, with those made here since."""

    async def take_place(self, owner: str, *, limit: int) -> bool:
        """Counts one more of the owner's. False, and not counted, when there are as many as the limit; those of ended
        sessions that are not forgotten are among them."""
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

    async def add(self, row: SamplingSession) -> SamplingSession:
        """Adds it and returns it; the first one when it is a repeat."""
        if await self._database.add_once(row):
            return row
        async with self._database.begin() as db:
            return await db.get_one(SamplingSession, row.sampling_session_id)

    async def get(self, sampling_session_id: str) -> SamplingSession | None:
        """None when it is unknown."""
        return await self._living.get(sampling_session_id)

    def lives(self, sampling_session_id: str) -> bool:
        """After `get`: only those of live sessions are kept in memory."""
        return sampling_session_id in self._living

    async def join(self, sampling_session_id: str) -> int:
        """A number from 1 that no other client of the sampling session has."""
        row = update(SamplingSession).where(SamplingSession.sampling_session_id == sampling_session_id)
        query = row.values(num_joined=SamplingSession.num_joined + 1).returning(SamplingSession.num_joined)
        async with self._database.begin() as db:
            return (await db.scalars(query)).one()

    async def mark(self, sampling_session_id: str, clone_id: int) -> SampleMark | None:
        async with self._database.begin() as db:
            return await db.get(SampleMark, (sampling_session_id, clone_id))

    async def put_mark(self, mark: SampleMark, *, home: str | None) -> bool:
        """False when the samples have another home than this one, which is None where there is one gateway."""
        values = {"low": mark.low, "high": mark.high}
        key = {"sampling_session_id": mark.sampling_session_id, "clone_id": mark.clone_id}
        query = self._database.insert(SampleMark).values(**key, **values, home=home)
        query = query.on_conflict_do_update(
            index_elements=list(key), set_=values, where=None if home is None else SampleMark.home == home
        )
        async with self._database.begin() as db:
            return (await db.scalars(query.returning(SampleMark.low))).one_or_none() is not None
