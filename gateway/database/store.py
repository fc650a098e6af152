"""What exists, in SQL. Rows come out detached and are read only; every change is a method here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, ExceptionContext, Table, bindparam, delete, event, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import InstrumentedAttribute

from gateway.database.tables import (
    DELETED_AT,
    Base,
    Checkpoint,
    CountedOperation,
    CustomLoss,
    GatewayRow,
    Model,
    Operation,
    SampleMark,
    SamplingSession,
    Session,
    Setting,
)
from gateway.metrics import Metrics
from tinsmith.rpc.paths import KINDS, TinkerPath

MIGRATIONS = Path(__file__).parent / "migrations"
_MAX_WHOSE = 100_000


class Whose(NamedTuple):
    """To whom a session belongs, for ever."""

    owner: str
    key_id: str
    """Of the key that made it."""


_MIGRATION_LOCK = 0x74696E736D697468
"""An advisory lock of PostgreSQL."""
_PER_QUERY = 500
"""Ids in one query: databases limit its parameters."""


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _count_error(metrics: Metrics, context: ExceptionContext) -> None:
    error = context.sqlalchemy_exception
    if not isinstance(error, IntegrityError):  # which is how a repeat is told
        metrics.database_errors.labels(type(error or context.original_exception).__name__).inc()


class Store:
    def __init__(self, url: str, metrics: Metrics) -> None:
        self._engine = create_async_engine(url)
        self._seconds = metrics.database_seconds
        event.listen(self._engine.sync_engine, "handle_error", partial(_count_error, metrics))
        self._new = async_sessionmaker(self._engine, expire_on_commit=False)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine.sync_engine, "connect", _set_up_sqlite)
        # Rows that never change while their session lives, so that a sample or a batch costs no query.
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._beating: set[str] = set()
        """Living sessions that have sent a heartbeat here."""
        self._beats: dict[str, float] = {}
        self.is_shared = False
        """Other gateways change the database, too."""
        self._whose: OrderedDict[str, Whose] = OrderedDict()

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._engine.dialect.name

    async def migrate(self) -> None:
        """Brings the schema to head. Gateways that start at the same time do it one after the other."""
        async with self._engine.begin() as connection:
            if self.dialect == "postgresql":
                await connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            else:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            await connection.run_sync(_upgrade)

    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        with self._seconds.time():
            async with self._new() as db, db.begin():
                yield db

    def insert(self, table: type[Base] | Table) -> Any:
        """An INSERT with the ON CONFLICT of this database."""
        return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[self.dialect](table)

    async def keep_newest(self, table: type[Base], column: InstrumentedAttribute[Any], *, number: int) -> None:
        """Deletes the rows that are not among the `number` with the largest values in this column, and
        those that tie with the first to go. The column needs an index."""
        async with self.begin() as db:
            first = await db.scalar(select(column).order_by(column.desc()).offset(number).limit(1))
            if first is not None:
                await db.execute(delete(table).where(column <= first))

    async def _add_once(self, row: Base) -> bool:
        """False when a row with this key is there already."""
        try:
            async with self.begin() as db:
                db.add(row)
        except IntegrityError:
            return False
        return True

    # Sessions

    async def create_session(
        self, *, owner: str, key_id: str = "", idempotency_key: str | None, **facts: Any
    ) -> Session:
        """A new session; the one made before when the same owner repeats the key."""
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
        if await self._add_once(session):
            return session
        known = await self.session_of_key(owner, idempotency_key)
        assert known is not None
        return known

    async def count_sessions(self, *, owner: str | None = None) -> int:
        """Those that have not ended; None: everybody's."""
        query = select(func.count()).where(Session.ended_at.is_(None))
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self.begin() as db:
            return await db.scalar(query) or 0

    async def session_of_key(self, owner: str, idempotency_key: str | None) -> Session | None:
        """The session that the owner made with this key."""
        if idempotency_key is None:
            return None
        query = select(Session).where(Session.owner == owner, Session.idempotency_key == idempotency_key)
        async with self.begin() as db:
            return (await db.scalars(query)).one_or_none()

    async def session(self, session_id: str) -> Session | None:
        async with self.begin() as db:
            return await db.get(Session, session_id)

    async def whose(self, session_id: str) -> Whose | None:
        """None for an unknown session."""
        if session_id not in self._whose:
            session = await self.session(session_id)
            if session is None:
                return None
            self._whose[session_id] = Whose(session.owner, session.key_id)
            if len(self._whose) > _MAX_WHOSE:
                self._whose.popitem(last=False)
        return self._whose.get(session_id)

    def known_whose(self, session_id: str) -> Whose | None:
        """None unless it is in memory, as it is soon after `whose`."""
        return self._whose.get(session_id)

    async def heartbeat(self, session_id: str) -> bool:
        """True when the session lives. It is written behind, all sessions at once: a heartbeat waits for no disk."""
        if session_id not in self._beating:
            async with self.begin() as db:
                if not await self._lives(db, session_id):
                    return False
            self._beating.add(session_id)
        self._beats[session_id] = time.time()
        return True

    async def write_heartbeats(self) -> None:
        beats, self._beats = self._beats, {}
        if not beats:
            return
        rows = [{"id": session_id, "at": at} for session_id, at in sorted(beats.items())]
        session = Session.__table__.c
        query = update(Session.__table__).where(session.session_id == bindparam("id"))  # type: ignore[arg-type]
        async with self.begin() as db:
            await db.execute(query.values(last_seen_at=bindparam("at")), rows)

    async def end_session(self, session_id: str, *, reason: str, detail: str | None) -> bool:
        """True for the first end; a later one changes nothing."""
        live = update(Session).where(Session.session_id == session_id, Session.ended_at.is_(None))
        async with self.begin() as db:
            result = await db.execute(live.values(ended_at=time.time(), end_reason=reason, end_detail=detail))
            ended = result.rowcount > 0  # type: ignore[attr-defined]
        self._forget_sessions({session_id})
        return ended

    def _forget_sessions(self, session_ids: set[str]) -> None:
        self._beating -= session_ids
        self._models = {key: row for key, row in self._models.items() if row.session_id not in session_ids}
        self._samplers = {key: row for key, row in self._samplers.items() if row.session_id not in session_ids}

    async def forget_ended_sessions(self) -> set[str]:
        """Those that another gateway has ended and that were still known here."""
        of_rows = {row.session_id for rows in (self._models, self._samplers) for row in rows.values()}
        known = sorted(of_rows | self._beating)
        ended: set[str] = set()
        for start in range(0, len(known), _PER_QUERY):
            some = Session.session_id.in_(known[start : start + _PER_QUERY])
            async with self.begin() as db:
                ended.update(await db.scalars(select(Session.session_id).where(some, Session.ended_at.is_not(None))))
        if ended:
            self._forget_sessions(ended)
        return ended

    async def assign_project(self, session_id: str, project_id: str) -> None:
        async with self.begin() as db:
            await db.execute(update(Session).where(Session.session_id == session_id).values(project_id=project_id))

    async def silent_sessions(self, *, seen_before: float) -> list[str]:
        query = select(Session.session_id).where(Session.ended_at.is_(None), Session.last_seen_at < seen_before)
        async with self.begin() as db:
            return list(await db.scalars(query))

    # Models

    async def add_model(self, model: Model) -> None:
        """Adds it; a repeat changes nothing."""
        await self._add_once(model)

    async def model(self, model_id: str, *, is_newest: bool = False) -> Model | None:
        """The model, also one of an ended session until it is released. What is known of
        it may be older than the database where another gateway has changed it; `is_newest` asks that."""
        if model_id in self._models and not (is_newest and self.is_shared):
            return self._models[model_id]
        async with self.begin() as db:
            row = await db.get(Model, model_id)
            live = row is not None and await self._lives(db, row.session_id)
        if row is not None and live:
            self._models[model_id] = row
        return row

    async def complete_model(self, model_id: str, **facts: Any) -> None:
        async with self.begin() as db:
            await db.execute(update(Model).where(Model.model_id == model_id).values(**facts))
        self._models.pop(model_id, None)

    async def move_inflight(
        self, model_id: str, version_id: str, location: str, *, is_newer: Callable[[str, str], bool]
    ) -> bool:
        """Inflight samplers of the model follow it to this version; False when they are there, or at a newer one."""
        moved = False
        while not moved:
            async with self.begin() as db:
                model = await db.get_one(Model, model_id)
                seen = model.inflight_version_id
                if seen is not None and not is_newer(version_id, seen):
                    return False
                unchanged = Model.inflight_version_id.is_(None) if seen is None else Model.inflight_version_id == seen
                query = update(Model).where(Model.model_id == model_id, unchanged)
                result = await db.execute(query.values(inflight_version_id=version_id, inflight_location=location))
                moved = result.rowcount > 0  # type: ignore[attr-defined]
        self._models.pop(model_id, None)
        return True

    async def unreleased_models(self) -> list[tuple[Model, Session]]:
        """Models of ended sessions that the trainer still holds."""
        query = select(Model, Session).join(Session).where(Session.ended_at.is_not(None), Model.released_at.is_(None))
        async with self.begin() as db:
            return [(model, session) for model, session in await db.execute(query)]

    async def release_model(self, model_id: str) -> None:
        """The trainer has freed it; what was kept to finish its operations goes too."""
        async with self.begin() as db:
            await db.execute(update(Model).where(Model.model_id == model_id).values(released_at=time.time()))
            await db.execute(delete(Operation).where(Operation.model_id == model_id))
            await db.execute(delete(CountedOperation).where(CountedOperation.model_id == model_id))

    # Sampling sessions

    async def add_sampling_session(self, row: SamplingSession) -> SamplingSession:
        """Adds it and returns it; the first one when it is a repeat."""
        if await self._add_once(row):
            return row
        async with self.begin() as db:
            return await db.get_one(SamplingSession, row.sampling_session_id)

    async def sampling_session(self, sampling_session_id: str) -> SamplingSession | None:
        """None when it is unknown."""
        if sampling_session_id in self._samplers:
            return self._samplers[sampling_session_id]
        async with self.begin() as db:
            row = await db.get(SamplingSession, sampling_session_id)
            live = row is not None and await self._lives(db, row.session_id)
        if row is not None and live:
            self._samplers[sampling_session_id] = row
        return row

    def sampling_session_lives(self, sampling_session_id: str) -> bool:
        """After sampling_session: only those of live sessions are kept in memory."""
        return sampling_session_id in self._samplers

    async def join_sampling_session(self, sampling_session_id: str) -> int:
        """A number from 1 that no other client of the sampling session has."""
        row = update(SamplingSession).where(SamplingSession.sampling_session_id == sampling_session_id)
        query = row.values(num_joined=SamplingSession.num_joined + 1).returning(SamplingSession.num_joined)
        async with self.begin() as db:
            return (await db.scalars(query)).one()

    async def sample_mark(self, sampling_session_id: str, clone_id: int) -> SampleMark | None:
        async with self.begin() as db:
            return await db.get(SampleMark, (sampling_session_id, clone_id))

    async def put_sample_mark(self, mark: SampleMark, *, home: str | None) -> bool:
        """False when the samples have another home than this one, which is None where there is one gateway."""
        values = {"low": mark.low, "high": mark.high}
        key = {"sampling_session_id": mark.sampling_session_id, "clone_id": mark.clone_id}
        query = self.insert(SampleMark).values(**key, **values, home=home)
        query = query.on_conflict_do_update(
            index_elements=list(key), set_=values, where=None if home is None else SampleMark.home == home
        )
        async with self.begin() as db:
            return (await db.scalars(query.returning(SampleMark.low))).one_or_none() is not None

    @staticmethod
    async def _lives(db: AsyncSession, session_id: str) -> bool:
        query = select(Session.session_id).where(Session.session_id == session_id, Session.ended_at.is_(None))
        return await db.scalar(query) is not None

    # Checkpoints

    async def put_checkpoint(self, checkpoint: Checkpoint, *, settles: str | None = None) -> bool:
        """Adds it, or replaces the one of the same path. False when this very save was there already.

        `settles`: the request that has made it. False, and nothing is written, when that is settled: what it made may
        be gone since.
        """
        names = [column.key for column in Checkpoint.__table__.columns]
        # What the caller leaves to its default is absent here.
        values = {name: value for name in names if (value := getattr(checkpoint, name)) is not None}
        query = self.insert(Checkpoint).values(values)
        changed = {name: query.excluded[name] for name in names if name != "path"}
        is_other = None if settles is not None else Checkpoint.version_id != query.excluded.version_id
        query = query.on_conflict_do_update(index_elements=["path"], set_=changed, where=is_other)
        async with self.begin() as db:
            if settles is not None and not await self._settle(db, settles):
                return False
            return (await db.scalars(query.returning(Checkpoint.path))).one_or_none() is not None

    async def checkpoint(self, path: str) -> Checkpoint | None:
        """The checkpoint, also an expired one."""
        async with self.begin() as db:
            return await db.get(Checkpoint, path)

    async def expired_checkpoints(self) -> list[Checkpoint]:
        async with self.begin() as db:
            over = Checkpoint.expires_at <= time.time()
            query = select(Checkpoint).where(over, or_(~Checkpoint.pinned, Checkpoint.expires_at == DELETED_AT))
            return list(await db.scalars(query))

    async def count_checkpoints(self) -> dict[str, tuple[int, int]]:
        """Number and bytes, of each kind of a path."""
        sums = select(Checkpoint.kind, func.count(), func.sum(Checkpoint.size_bytes)).group_by(Checkpoint.kind)
        async with self.begin() as db:
            found = {kind: (number, int(num_bytes)) for kind, number, num_bytes in await db.execute(sums)}
        return {kind: found.get(kind, (0, 0)) for kind in KINDS}

    async def delete_checkpoint(self, path: str) -> bool:
        """False when another gateway was faster."""
        async with self.begin() as db:
            result = await db.execute(delete(Checkpoint).where(Checkpoint.path == path))
            return result.rowcount > 0  # type: ignore[attr-defined]

    async def update_checkpoint(self, path: str, **facts: Any) -> None:
        async with self.begin() as db:
            await db.execute(update(Checkpoint).where(Checkpoint.path == path).values(**facts))

    # Settings

    async def setting(self, name: str, *, default: str) -> str:
        """Its value; `default` becomes its value when it has none."""
        await self._add_once(Setting(name=name, value=default))
        async with self.begin() as db:
            return (await db.get_one(Setting, name)).value

    async def swap_setting(self, name: str, *, old: str, new: str) -> bool:
        """Sets it if its value is `old`. False when another gateway was faster."""
        query = update(Setting).where(Setting.name == name, Setting.value == old)
        async with self.begin() as db:
            result = await db.execute(query.values(value=new))
            return result.rowcount > 0  # type: ignore[attr-defined]

    # Custom losses

    async def add_custom_loss(self, loss: CustomLoss) -> None:
        """Adds it; a repeat changes nothing."""
        await self._add_once(loss)

    async def custom_loss(self, loss_id: str) -> CustomLoss | None:
        async with self.begin() as db:
            return await db.get(CustomLoss, loss_id)

    async def num_custom_losses(self, session_id: str) -> int:
        query = select(func.count()).select_from(CustomLoss).where(CustomLoss.session_id == session_id)
        async with self.begin() as db:
            return await db.scalar(query) or 0

    # Operations

    async def add_operation(self, operation: Operation) -> bool:
        """Adds it. A repeat changes nothing, and is False."""
        return await self._add_once(operation)

    async def settle_operation(self, request_id: str) -> None:
        """Its answer needs nothing more to be written down."""
        async with self.begin() as db:
            await self._settle(db, request_id)

    @staticmethod
    async def _settle(db: AsyncSession, request_id: str) -> bool:
        """False when it was settled before."""
        query = update(Operation).where(Operation.request_id == request_id, Operation.settled_at.is_(None))
        result = await db.execute(query.values(settled_at=time.time()))
        return result.rowcount > 0  # type: ignore[attr-defined]

    async def replace_operation(self, operation: Operation) -> None:
        async with self.begin() as db:
            await db.merge(operation)

    async def take_over_operations(self, gateway_id: str, *, kinds: Collection[str]) -> list[str]:
        """The request ids of those whose gateway is gone before they were settled; each to one who asks."""
        is_left = or_(
            Operation.gateway_id.is_(None),
            Operation.gateway_id.not_in(select(GatewayRow.gateway_id)) & (Operation.gateway_id != gateway_id),
        )
        query = update(Operation).where(
            Operation.settled_at.is_(None), Operation.error.is_(None), Operation.kind.in_(kinds), is_left
        )
        async with self.begin() as db:
            return list(await db.scalars(query.values(gateway_id=gateway_id).returning(Operation.request_id)))

    async def delete_refused(self, *, before: float) -> None:
        async with self.begin() as db:
            await db.execute(delete(Operation).where(Operation.error.is_not(None), Operation.created_at < before))

    async def delete_operation(self, request_id: str) -> None:
        async with self.begin() as db:
            await db.execute(delete(Operation).where(Operation.request_id == request_id))

    async def is_saving(self, path: TinkerPath) -> bool:
        """A save of the run makes this checkpoint, and is not through."""
        query = select(Operation.request_id).where(
            Operation.model_id == path.run_id,
            Operation.path == str(path),
            Operation.kind.in_(("save_weights", "save_weights_for_sampler")),
            Operation.error.is_(None),
            Operation.settled_at.is_(None),
        )
        async with self.begin() as db:
            return await db.scalar(query.limit(1)) is not None

    async def operation(self, request_id: str) -> Operation | None:
        async with self.begin() as db:
            return await db.get(Operation, request_id)


def _set_up_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a receipt may rest on a row
    cursor.close()
