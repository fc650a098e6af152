"""The connection to the database: transactions, the schema, and the differences between SQLite and PostgreSQL."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, ExceptionContext, Executable, Table, delete, event, func, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import ColumnElement

from gateway.database.outages import DatabaseUnusable, in_words, is_outage
from gateway.database.tables.base import Base
from gateway.metrics import Metrics

T = TypeVar("T")
Row = TypeVar("Row", bound=Base)

Note = Callable[[AsyncSession], Awaitable[None]]
"""A function that reads or writes further rows in the given transaction."""

MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x74696E736D697468
"""Number of the advisory lock that a gateway takes in PostgreSQL while it migrates."""
_PER_PASS = 50
"""Most rows of a list that are read in one pass of the event loop: up to 20 ms, with metadata of 64 Ki characters
each."""
PER_QUERY = 500
"""Most items that one query names, because databases limit its parameters."""
_CONNECT_TIMEOUT_S = 10.0
"""Longest time in which a connection to PostgreSQL is made, in seconds."""
_CONNECTIONS = 10
"""Most connections of a gateway to PostgreSQL, half of which stay open. PostgreSQL itself takes 100 by default."""
_LOCKED_S = 30
"""Longest time for which SQLite waits for a lock that another connection holds, in seconds."""
_SILENT_S = 10
"""Time after which a connection to a PostgreSQL server is given up whose machine does not answer, in seconds; it may
take up to twice as long. The server's name may lead to another machine by then."""


def parts(items: Sequence[T], size: int = PER_QUERY) -> Iterator[Sequence[T]]:
    """The items, at most `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


async def rows_of(db: AsyncSession, query: Executable) -> list[Any]:
    """All rows, as tuples, read a few at a time. Other work of the event loop runs in between.

    SQLAlchemy makes rows on the event loop, and parses their JSON there: a thousand runs or checkpoints with long
    metadata, read in one go, would block it for a second.
    """
    return [row async for row in await db.stream(query, execution_options={"yield_per": _PER_PASS})]


async def all_of(db: AsyncSession, query: Executable) -> list[Any]:
    """The first column of all rows, read as in `rows_of`."""
    return [row async for row in await db.stream_scalars(query, execution_options={"yield_per": _PER_PASS})]


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:  # the database names a revision that is not in MIGRATIONS
        raise InvalidRequestError(
            f"a newer Tinsmith has changed its tables ({error}); start that version, or restore a backup"
        ) from error


def _count_error(metrics: Metrics, context: ExceptionContext) -> None:
    error = context.sqlalchemy_exception
    if not isinstance(error, IntegrityError):  # `add_once` expects this one when a row exists
        metrics.stored.database_errors.labels(type(error or context.original_exception).__name__).inc()


class Database:
    """Opens transactions, and brings the schema up to date."""

    def __init__(self, url: str, metrics: Metrics) -> None:
        is_sqlite = make_url(url).get_backend_name() == "sqlite"
        if is_sqlite:
            options: dict[str, Any] = {"connect_args": {"factory": _Sqlite}}
        else:
            pool = {"pool_size": _CONNECTIONS // 2, "max_overflow": _CONNECTIONS - _CONNECTIONS // 2}
            options = {"connect_args": {"timeout": _CONNECT_TIMEOUT_S}, **pool}
        self._engine = create_async_engine(url, **options)
        self._seconds = metrics.stored.database_seconds
        self.dropped_rows = metrics.stored.dropped_rows
        event.listen(self._engine.sync_engine, "handle_error", partial(_count_error, metrics))
        self._new = async_sessionmaker(self._engine, expire_on_commit=False)
        if not is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _set_up_postgresql)
        self.is_shared = False
        """Whether other gateways also change the database."""

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._engine.dialect.name

    async def migrate(self) -> None:
        """Brings the schema up to date. Gateways that start at the same time do so one after the other."""
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
        """A transaction. Raises DatabaseUnusable in an outage."""
        try:
            with self._seconds.time():
                async with self._new() as db, db.begin():
                    yield db
        except Exception as error:
            if isinstance(error, DatabaseUnusable) or not is_outage(error):
                raise
            raise DatabaseUnusable(in_words(error)) from error

    # Transactions of one statement

    async def get(self, table: type[Row], key: Any) -> Row | None:
        """The row with this primary key; None when there is none."""
        async with self.begin() as db:
            return await db.get(table, key)

    async def first(self, query: Executable) -> Any:
        """The first column of the first row; None when there is no row."""
        async with self.begin() as db:
            return await db.scalar(query)

    async def all(self, query: Executable) -> list[Any]:
        """The first column of all rows, such as the objects of a mapped class."""
        async with self.begin() as db:
            return await all_of(db, query)

    async def rows(self, query: Executable) -> list[Any]:
        """All rows, as tuples."""
        async with self.begin() as db:
            return await rows_of(db, query)

    async def run(self, statement: Executable, values: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Executes an UPDATE, DELETE or INSERT, once for each of `values` if they are given. Returns the number of
        changed, deleted or added rows."""
        async with self.begin() as db:
            result: Any = await db.execute(statement, values)
            return result.rowcount

    def insert(self, table: type[Base] | Table) -> Any:
        """An INSERT with the ON CONFLICT of this database."""
        return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[self.dialect](table)

    async def delete_old(
        self, at: InstrumentedAttribute[float], *which: ColumnElement[bool], before: float, keep_newest: int
    ) -> None:
        """Deletes rows from before a time, and all but the `keep_newest` newest rows. Only rows count for which `which`
        is true.

        `at`: the column with a row's time, which needs an index. Rows with the same time as a deleted row go, too.
        """
        table: Any = at.class_
        async with self.begin() as db:
            await db.execute(delete(table).where(*which, at < before))
            first = await db.scalar(select(at).where(*which).order_by(at.desc()).offset(keep_newest).limit(1))
            if first is not None:
                await db.execute(delete(table).where(*which, at <= first))

    async def add_once(self, row: Base, *, note: Note | None = None) -> bool:
        """Adds the row. Returns False if there is already a row with its key. `note`: called in the same transaction
        after the row is added, to read or write further rows."""
        try:
            async with self.begin() as db:
                db.add(row)
                if note is not None:
                    await db.flush()
                    await note(db)
        except IntegrityError:
            return False
        return True


class _Sqlite(sqlite3.Connection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute(f"PRAGMA busy_timeout={1000 * _LOCKED_S}")
        self._to_wal()
        self.execute("PRAGMA synchronous=FULL")  # a receipt promises that its row is on the disk

    def _to_wal(self) -> None:
        """Switches to WAL. When two gateways do this to a new database at the same time, SQLite detects a deadlock, and
        reports a locked database to one of them at once, without waiting for busy_timeout. So this method tries
        again."""
        deadline = time.monotonic() + _LOCKED_S
        while True:
            try:
                self.execute("PRAGMA journal_mode=WAL").fetchall()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)  # the connection has a thread of its own

    def close(self) -> None:
        """Rolls the transaction back before closing. Without that, SQLite would hold its lock until the last statement
        is finalized; for cancelled work that is when the garbage collector takes the cursor."""
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()


def _set_up_postgresql(connection: Any, _record: object) -> None:
    """Sets TCP timeouts. Without them, a query to a machine that vanished would hang for a quarter of an hour."""
    found = connection.driver_connection._transport.get_extra_info("socket")
    if found.family == socket.AF_UNIX:
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS does not have all of these options.
    for name, value in (("TCP_KEEPIDLE", _SILENT_S), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", 1000 * _SILENT_S)):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
