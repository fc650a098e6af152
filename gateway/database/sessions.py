"""Rows of sessions, and of the training runs and sampling sessions in them.

Rows that belong to live sessions are cached (`LiveRows`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

from cachetools import LRUCache
from sqlalchemy import bindparam, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer, load_only

from gateway.database.connection import Database, Note
from gateway.database.operations import settle
from gateway.database.tables.operations import Operation
from gateway.database.tables.samples import SampleMark
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.database.tables.tenants import CountedOperation
from gateway.database.write_behind import WriteBehind
from tinsmith.rpc.paths import is_newer

_Row = TypeVar("_Row", Model, SamplingSession)

_MAX_WHOSE = 100_000
"""Most sessions whose owners are kept in memory."""
_MAX_LIVING = 50_000
"""Most rows in a `LiveRows`, a kilobyte each. One owner may have a million sampling sessions."""
_COUNTED_S = 60.0
"""Time for which a count of sampling sessions is used before they are counted again, in seconds."""
_FULL_S = 1.0
"""Time for which a count that has reached the limit is used, in seconds."""
_MAX_UNMARKED = 4096
"""Most sampling sessions that are known to have no mark."""
_COMING_S = 60.0
"""Longest time from the placement of a run until its trainer has made it, in seconds. A run that takes longer is taken
to have failed."""
_CLOCKS_S = 60.0
"""Largest difference of the clocks of two gateways' machines, plus the time from an end's `ended_at` to its commit, in
seconds."""


class _RowCache(LRUCache[str, _Row]):
    """The rows that were asked for last, which can also be found by their session."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self.keys_of: defaultdict[str, set[str]] = defaultdict(set)
        """session_id -> keys of its rows."""

    def __setitem__(self, key: str, row: _Row) -> None:
        super().__setitem__(key, row)
        self.keys_of[row.session_id].add(key)

    def __delitem__(self, key: str) -> None:
        """Removes a row. LRUCache also calls this for a row that gives way to another one."""
        session_id = self[key].session_id
        super().__delitem__(key)
        self.keys_of[session_id].discard(key)
        if not self.keys_of[session_id]:
            del self.keys_of[session_id]


class LiveRows(Generic[_Row]):
    """Caches the rows of one table that were asked for last, while their sessions live."""

    def __init__(self, database: Database, table: type[_Row]) -> None:
        self._database = database
        self._table = table
        self._rows = _RowCache[_Row](_MAX_LIVING)
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

    def has_rows_of(self, session_id: str) -> bool:
        """Whether rows of the session are in memory."""
        return session_id in self._rows.keys_of

    def forget_sessions(self, session_ids: Iterable[str]) -> None:
        self._num_changes += 1
        for session_id in session_ids:
            for key in list(self._rows.keys_of.get(session_id, ())):
                del self._rows[key]


async def is_live(db: AsyncSession, session_id: str) -> bool:
    """Whether the session exists and has not ended."""
    query = select(Session.session_id).where(Session.session_id == session_id, Session.ended_at.is_(None))
    return await db.scalar(query) is not None


class SessionOwner(NamedTuple):
    """The owner and the key of a session, which never change."""

    owner: str
    key_id: str
    """Id of the key that made the session."""


class SessionRows:
    """Rows of sessions."""

    def __init__(
        self, database: Database, *, of_sessions: Sequence[LiveRows[Model] | LiveRows[SamplingSession]]
    ) -> None:
        """`of_sessions`: caches of rows that belong to sessions. They forget the rows of a session that ends."""
        self._database = database
        self._of_sessions = of_sessions
        self._living: set[str] = set()
        """Live sessions among those that were made or asked for at this gateway."""
        self._beats: dict[str, float] = {}
        self.heartbeats = WriteBehind(self._write_beats, what="heartbeats of sessions")
        self._whose: LRUCache[str, SessionOwner] = LRUCache(_MAX_WHOSE)
        self._ends_until = time.time()
        """Ends of sessions by other gateways were read up to here, in seconds since 1970."""

    async def create(
        self, *, owner: str, key_id: str = "", idempotency_key: str | None = None, **facts: Any
    ) -> Session:
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
        """Number of sessions that have not ended. `owner` None means those of all owners."""
        query = select(func.count()).where(Session.ended_at.is_(None))
        if owner is not None:
            query = query.where(Session.owner == owner)
        return await self._database.first(query) or 0

    async def of_key(self, owner: str, idempotency_key: str | None) -> Session | None:
        """The session that the owner made with this key; None when there is none."""
        if idempotency_key is None:
            return None
        query = select(Session).where(Session.owner == owner, Session.idempotency_key == idempotency_key)
        return await self._database.first(query)

    async def get(self, session_id: str) -> Session | None:
        return await self._database.get(Session, session_id)

    async def whose(self, session_id: str) -> SessionOwner | None:
        """Owner and key of the session; None for an unknown session."""
        if session_id not in self._whose:
            query = select(Session.owner, Session.key_id).where(Session.session_id == session_id)
            for owner, key_id in await self._database.rows(query):
                self._whose[session_id] = SessionOwner(owner, key_id)
        return self._whose.get(session_id)

    def _know(self, session: Session) -> None:
        self._whose[session.session_id] = SessionOwner(session.owner, session.key_id)

    def known_whose(self, session_id: str) -> SessionOwner | None:
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
        """Notes a heartbeat. Returns False when the session does not live.

        `_write_beats` later writes the heartbeats of all sessions together, so a heartbeat does not wait for the disk.
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
            await self._database.run(query.values(last_seen_at=bindparam("at")), rows)
        except BaseException:
            self._beats = beats | self._beats
            raise

    async def end(self, session_id: str, *, reason: str, detail: str | None) -> bool:
        """Ends the session. Returns False, and changes nothing, when the session has ended before or is unknown."""
        live = update(Session).where(Session.session_id == session_id, Session.ended_at.is_(None))
        try:
            return await self._database.run(live.values(ended_at=time.time(), end_reason=reason, end_detail=detail)) > 0
        finally:
            self._forget({session_id})  # also after an error: a commit whose connection was lost may have succeeded

    def _forget(self, session_ids: set[str]) -> None:
        self._living -= session_ids
        for living in self._of_sessions:
            living.forget_sessions(session_ids)

    async def forget_ended(self) -> set[str]:
        """Forgets the sessions that this gateway took for live and that another gateway has ended. Returns their ids.

        The query reads only the ends since the last call, by an index, however many sessions live.
        """
        now = time.time()
        newly_ended = select(Session.session_id).where(Session.ended_at > self._ends_until - _CLOCKS_S)
        ended = {session_id for session_id in await self._database.all(newly_ended) if self._takes_for_live(session_id)}
        self._ends_until = now
        if ended:
            self._forget(ended)
        return ended

    def _takes_for_live(self, session_id: str) -> bool:
        return session_id in self._living or any(living.has_rows_of(session_id) for living in self._of_sessions)

    async def assign_project(self, session_id: str, project_id: str) -> None:
        await self._database.run(update(Session).where(Session.session_id == session_id).values(project_id=project_id))

    async def silent(self, *, seen_before: float) -> list[str]:
        """Live sessions whose last heartbeat came before this time, in seconds since 1970."""
        query = select(Session.session_id).where(Session.ended_at.is_(None), Session.last_seen_at < seen_before)
        return await self._database.all(query)


class ModelRows:
    """Rows of training runs, from their creation to their release."""

    def __init__(self, database: Database, living: LiveRows[Model]) -> None:
        self._database = database
        self._living = living

    async def add(self, model: Model) -> None:
        """Adds the model. Changes nothing if there is a row with its id."""
        await self._database.add_once(model)

    async def get(self, model_id: str, *, is_newest: bool = False) -> Model | None:
        """The model; None for an unknown id.

        The row in memory may be outdated, because another gateway may have changed the run. With `is_newest` the row is
        read from the database if several gateways use it.
        """
        if is_newest and self._database.is_shared:
            return await self._living.get_newest(model_id)
        return await self._living.get(model_id)

    async def count_coming(self) -> dict[str, int]:
        """trainer_id -> number of runs that were placed there in the last `_COMING_S`, and that the trainer has not
        made yet."""
        query = select(Model.trainer_id, func.count()).where(
            Model.trainer_id.is_not(None),
            Model.lora_rank.is_(None),
            Model.released_at.is_(None),
            Model.created_at > time.time() - _COMING_S,
        )
        return dict(await self._database.rows(query.group_by(Model.trainer_id)))

    async def set_trainer(self, model_id: str, trainer_id: str) -> None:
        """Notes the trainer of a run whose row names no trainer."""
        query = update(Model).where(Model.model_id == model_id, Model.trainer_id.is_(None))
        await self._database.run(query.values(trainer_id=trainer_id))
        self._living.forget(model_id)

    async def complete(self, model_id: str, **facts: Any) -> None:
        """Sets columns that are known only from the trainer's reply."""
        await self._database.run(update(Model).where(Model.model_id == model_id).values(**facts))
        self._living.forget(model_id)

    async def move_inflight(self, model_id: str, version_id: str, location: str) -> bool:
        """Moves the model's inflight samplers to this version. Returns False when they sample from this version, or
        from a newer one, already."""
        moved = False
        while not moved:
            async with self._database.begin() as db:
                model = await db.get_one(Model, model_id)
                seen = model.inflight_version_id
                if seen is not None and not is_newer(version_id, seen, run_id=model_id):
                    return False
                unchanged = Model.inflight_version_id.is_(None) if seen is None else Model.inflight_version_id == seen
                query = update(Model).where(Model.model_id == model_id, unchanged)
                result = await db.execute(query.values(inflight_version_id=version_id, inflight_location=location))
                moved = result.rowcount > 0  # type: ignore[attr-defined]
        self._living.forget(model_id)
        return True

    async def end(self, model_id: str) -> None:
        """Ends the run, so that it takes no more operations. A repeat changes nothing."""
        async with self._database.begin() as db:
            query = update(Model).where(Model.model_id == model_id, Model.ended_at.is_(None))
            await db.execute(query.values(ended_at=time.time()))
        self._living.forget(model_id)

    async def unreleased(self) -> list[tuple[Model, Session]]:
        """Models that the trainer still holds, though they or their sessions have ended."""
        has_ended = or_(Session.ended_at.is_not(None), Model.ended_at.is_not(None))
        query = select(Model, Session).join(Session).where(has_ended, Model.released_at.is_(None))
        without_notes = defer(Model.user_metadata), load_only(Session.ended_at, Session.end_reason)
        return [(model, session) for model, session in await self._database.rows(query.options(*without_notes))]

    async def release(self, model_id: str) -> None:
        """Notes that the trainer has freed the model, and deletes its operations."""
        async with self._database.begin() as db:
            await db.execute(update(Model).where(Model.model_id == model_id).values(released_at=time.time()))
            await db.execute(delete(Operation).where(Operation.model_id == model_id))
            await db.execute(delete(CountedOperation).where(CountedOperation.model_id == model_id))
        self._living.forget(model_id)


class SamplerRows:
    """Rows of sampling sessions, of the clients that join them, and of each client's progress."""

    def __init__(self, database: Database, living: LiveRows[SamplingSession]) -> None:
        self._database = database
        self._living = living
        self._counted: dict[str, tuple[float, int]] = {}
        """owner -> time of the last count on the monotonic clock, and the number, including those made here since."""
        self._unmarked: LRUCache[str, None] = LRUCache(_MAX_UNMARKED)
        """Sampling sessions that were made here and have no mark yet; `mark` does not ask the database for them."""

    async def take_place(self, owner: str, *, limit: int) -> bool:
        """Counts one more sampling session of the owner. Returns False, and counts nothing, when the limit is reached.

        Sampling sessions of ended sessions count until they are forgotten.
        """
        counted_at, number = self._counted.get(owner, (-math.inf, 0))
        if time.monotonic() - counted_at > (_COUNTED_S if number < limit else _FULL_S):
            counted_at = time.monotonic()
            query = select(func.count(SamplingSession.sampling_session_id)).join(Session).where(Session.owner == owner)
            number = await self._database.first(query) or 0
        if is_free := number < limit:
            number += 1
        self._counted[owner] = counted_at, number
        return is_free

    async def add(self, row: SamplingSession, *, settles: str | None = None) -> SamplingSession:
        """Adds the row and returns it. If there is a row with its id already, returns that one.

        `settles`: id of the operation that has made the row. The operation is settled in the same transaction, unless
        the row existed before.
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
        """Whether the session of this sampling session lives. The result is right only immediately after `get`, which
        loads the row into memory."""
        return sampling_session_id in self._living

    async def ephemeral(self, model: Model) -> set[tuple[str, str]]:
        """Location and version of the model's ephemeral saves that sampling sessions of its session use. Empty when the
        session has ended."""
        query = select(SamplingSession.location, SamplingSession.version_id).join(Session)
        query = query.where(
            SamplingSession.session_id == model.session_id,
            SamplingSession.location.startswith(f"{model.model_id}/ephemeral/", autoescape=True),
            Session.ended_at.is_(None),
        )
        return {(location, version_id) for location, version_id in await self._database.rows(query)}

    async def join(self, sampling_session_id: str) -> int:
        """A number for a new client, from 1 on, that no other client of the sampling session has."""
        row = update(SamplingSession).where(SamplingSession.sampling_session_id == sampling_session_id)
        query = row.values(num_joined=SamplingSession.num_joined + 1).returning(SamplingSession.num_joined)
        return await self._database.first(query)

    async def mark(self, sampling_session_id: str, clone_id: int) -> SampleMark | None:
        """The stored progress of a client; None when there is none."""
        if sampling_session_id in self._unmarked:
            return None
        return await self._database.get(SampleMark, (sampling_session_id, clone_id))

    async def put_mark(self, mark: SampleMark, *, home: str | None) -> bool:
        """Stores the progress of a client. Returns False, and stores nothing, when another gateway is the samples'
        home.

        `home`: id of this gateway; None when it is the only one.
        """
        self._unmarked.pop(mark.sampling_session_id, None)
        values = {"low": mark.low, "high": mark.high}
        key = {"sampling_session_id": mark.sampling_session_id, "clone_id": mark.clone_id}
        query = self._database.insert(SampleMark).values(**key, **values, home=home)
        query = query.on_conflict_do_update(
            index_elements=list(key), set_=values, where=None if home is None else SampleMark.home == home
        )
        return await self._database.first(query.returning(SampleMark.low)) is not None
