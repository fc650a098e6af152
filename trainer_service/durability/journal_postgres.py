"""The journal in PostgreSQL: its tables, which trainers share, and who may write. A Database of journal_database.py.

All is in the schema "tinsmith_journal". Format 1:

    about       one row: the format, and a random id of this set of tables
    trainers    one row for each trainer: its name, a random id, and the generation of its last process. `renewed_at`
                changes with every transaction, also while the trainer is idle. `pid` and `backend_start` identify its
                connection
    models, operations
                as in the file (journal_file.py), for all trainers. A model's row has its trainer's number

A connection sees its own trainer's rows only: the views `models` and `operations` of its session hide those of others.

A trainer takes the next generation when it starts. Each transaction locks the trainer's row and checks the generation
first, so from then on an older process changes nothing. The next generation is refused while the process of the last
one is alive: its connection is open, and the row is renewed.

A trainer that is lost can be fenced by another one, which then takes over its models: their rows get its number.
Fencing takes a generation that no process has. The row of a fenced trainer has no `pid` until it is started again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import EncodeError

from tinsmith.errors import FailedPrecondition, NotReady, OutOfCapacity, ServiceError
from tinsmith.rpc.postgres import described
from trainer_service.durability.journal_database import Superseded, Unstorable

if TYPE_CHECKING:
    import asyncpg

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
LEASE_S = 15.0
"""Time without a renewal after which a trainer whose connection is still open counts as dead, in seconds."""
RENEW_S = 3.0
"""Pause after which an idle trainer renews its row, in seconds."""
_LOOK_S = 0.5
"""Pause between two looks at the row of a trainer that may be alive, in seconds."""
_CONNECT_TIMEOUT_S = 10
_COMMAND_TIMEOUT_S = 30.0
"""Longest time for one statement, in seconds. A server whose machine has fallen silent is given up after it."""
_SETTINGS = {
    "application_name": "tinsmith trainer",
    # A trainer that stops within a transaction holds locks, and a machine that vanishes keeps its connection.
    "idle_in_transaction_session_timeout": "60000",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
_MOST_BYTES = 2**30 - 2**20
"""Largest value, in bytes. PostgreSQL ends the connection at a message of 1 GiB."""
_LOCK = 0x74736D6A
"""Number of the advisory lock under which the tables are made."""
_PASSING = ("08", "25", "28", "3D", "40", "55", "57", "58")
"""Classes of PostgreSQL's error codes that pass: connection, read-only, no access, no database, rolled back, not in the
right state, shut down or cancelled, system."""
_FULL = {"53100", "53200"}
_TOO_MANY_CONNECTIONS = "53300"
_DAMAGED = "XX"
_TOO_LARGE = ("22", "54")
"""Classes of error codes for values that PostgreSQL cannot store."""

_SCHEMA = """
CREATE SCHEMA IF NOT EXISTS tinsmith_journal;
CREATE TABLE tinsmith_journal.about (format INTEGER NOT NULL, id TEXT NOT NULL);
CREATE TABLE tinsmith_journal.trainers (
    number INTEGER GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    id TEXT NOT NULL DEFAULT replace(gen_random_uuid()::text, '-', ''),
    generation BIGINT NOT NULL DEFAULT 0,
    holder TEXT NOT NULL DEFAULT '',
    renewed_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    pid INTEGER,
    backend_start TIMESTAMPTZ
) WITH (fillfactor = 50);
CREATE TABLE tinsmith_journal.models (
    trainer INTEGER NOT NULL REFERENCES tinsmith_journal.trainers,
    model_id TEXT PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'live',
    created_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    reason TEXT NOT NULL DEFAULT '',
    cut_seq_id BIGINT NOT NULL DEFAULT -1,
    snapshot_seq_id BIGINT,
    snapshot_at DOUBLE PRECISION,
    snapshot_bytes BIGINT
);
CREATE TABLE tinsmith_journal.operations (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model_id TEXT NOT NULL REFERENCES tinsmith_journal.models ON DELETE CASCADE,
    seq_id BIGINT NOT NULL,
    kind TEXT NOT NULL,
    digest BYTEA NOT NULL,
    request BYTEA,
    state INTEGER NOT NULL DEFAULT 0,
    result BYTEA,
    accepted_at DOUBLE PRECISION NOT NULL,
    finished_at DOUBLE PRECISION,
    request_sum BYTEA,
    result_sum BYTEA,
    UNIQUE (model_id, seq_id)
);
ALTER TABLE tinsmith_journal.operations
    ALTER request SET STORAGE EXTERNAL, ALTER result SET STORAGE EXTERNAL; -- they are compressed, or small
CREATE INDEX expiring ON tinsmith_journal.operations (finished_at) WHERE result IS NOT NULL;
"""

_VIEWS = """
CREATE TEMP VIEW models AS SELECT * FROM tinsmith_journal.models WHERE trainer = {number};
ALTER VIEW models ALTER trainer SET DEFAULT {number};
CREATE TEMP VIEW operations AS SELECT * FROM tinsmith_journal.operations
    WHERE EXISTS (SELECT FROM models WHERE models.model_id = operations.model_id);
"""

_BEGIN = (
    "BEGIN; UPDATE tinsmith_journal.trainers SET renewed_at = clock_timestamp() WHERE number = {} AND generation = {}"
)
"""Both statements in one message, so that a transaction costs one exchange with the server less."""
_LOOK = """
SELECT number, id, generation, holder, renewed_at, pid, backend_start, EXISTS (
    SELECT FROM pg_stat_activity s WHERE s.pid = trainers.pid AND s.backend_start = trainers.backend_start
) AS alive FROM tinsmith_journal.trainers WHERE name = $1
"""


class _Rows:
    """The result of a statement."""

    def __init__(self, rows: list[tuple[Any, ...]], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)


class PostgresDatabase:
    """An open journal in PostgreSQL. One thread at a time uses it, also while it is opened, and never the thread of an
    event loop: asyncpg runs on a loop of its own."""

    all_model_ids = "SELECT model_id FROM tinsmith_journal.models"
    delete_moved: str | None = (
        "DELETE FROM tinsmith_journal.models WHERE model_id = ? AND state = 'moved' "
        "AND NOT EXISTS (SELECT FROM models WHERE models.model_id = tinsmith_journal.models.model_id)"
    )

    def __init__(self, url: str, trainer: str, *, lease_s: float = LEASE_S, renew_s: float = RENEW_S) -> None:
        """Connects, makes the tables if there are none, and takes the trainer's next generation. Waits for at most
        `lease_s` to find out whether an earlier process of the trainer is alive. `trainer`: its name.

        Raises SystemExit, which says what to do, when the database cannot be used, when its tables have another format,
        and when the trainer is alive elsewhere.
        """
        self.renew_s: float | None = renew_s
        self.name = described(url)
        self.trainer = trainer
        self._url = url
        self._lease_s = lease_s
        self._loop = asyncio.new_event_loop()
        self._connection: asyncpg.Connection | None = None
        self._number = 0
        self.generation = 0
        self.trainer_id = ""
        """Random id of the trainer, the same in every generation: 32 hexadecimal digits."""
        self.journal_id = ""
        """Random id of the tables, which all trainers in them share: 32 hexadecimal digits."""
        self._backend: tuple[int, Any] | None = None
        """The pid and start of the server process of the last connection."""
        try:
            self._open()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, Superseded):
                raise SystemExit(f"cannot open the journal {self.name}: {error or type(error).__name__}") from error
            raise
        logger.info("the journal %s: trainer %r, generation %d", self.name, trainer, self.generation)

    def begin(self) -> None:
        if self._connection is None or self._connection.is_closed():
            self._reconnect()
        elif self._connection.is_in_transaction():  # an earlier transaction that could not be rolled back
            self.rollback()
        status = self._run(self._connected.execute(_BEGIN.format(self._number, self.generation)))
        if status != "UPDATE 1":
            self.rollback()
            raise self._superseded()

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> _Rows:
        _check_sizes(values)
        text = _numbered(statement)
        if text.startswith("SELECT"):
            rows = [tuple(row) for row in self._run(self._connected.fetch(text, *values))]
            return _Rows(rows, len(rows))
        status: str = self._run(self._connected.execute(text, *values))
        count = status.rpartition(" ")[2]
        return _Rows([], int(count) if count.isdecimal() else -1)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> None:
        rows = list(values)
        for row in rows:
            _check_sizes(row)
        self._run(self._connected.executemany(_numbered(statement), rows))

    def commit(self) -> None:
        status = self._run(self._connected.execute("COMMIT"))
        if status != "COMMIT":
            raise ServiceError(f"the transaction was rolled back ({status})")

    def rollback(self) -> None:
        """A connection that cannot do so is dropped, which also ends the transaction."""
        try:
            if self._connection is not None and self._connection.is_in_transaction():
                self._run(self._connection.execute("ROLLBACK"))
        except Exception:
            self._drop()

    def fence(self, trainer_id: str) -> None:
        row = self._run(
            self._connected.fetchrow(
                "SELECT number, name, generation, holder, pid, backend_start, "
                "clock_timestamp() - renewed_at < $2 * interval '1 second' AS renewed "
                "FROM tinsmith_journal.trainers WHERE id = $1",
                *(trainer_id, self._lease_s),
            )
        )
        if row is None or row["number"] == self._number:
            raise FailedPrecondition(
                f"trainer_id: the journal {self.name} has no other trainer {trainer_id!r}", field="trainer_id"
            )
        if row["pid"] is None:
            return
        if row["renewed"]:
            raise NotReady(f"trainer {row['name']!r} is alive ({row['holder']}); try again")
        self._terminate(row["pid"], row["backend_start"])  # it may hold locks
        status = self._run(
            self._connected.execute(
                "UPDATE tinsmith_journal.trainers SET generation = generation + 1, holder = $3, pid = NULL, "
                "backend_start = NULL WHERE number = $1 AND generation = $2",
                *(row["number"], row["generation"], f"held by trainer {self.trainer!r}, which adopts its runs"),
            )
        )
        if status != "UPDATE 1":
            raise NotReady(f"trainer {row['name']!r} has been started; try again")
        logger.warning("trainer %r (%s) is dead: its process is fenced", row["name"], row["holder"])

    def take_over(self, model_id: str, trainer_id: str) -> bool:
        # The lock keeps the trainer from starting before the end of this transaction.
        number = self._value(
            "SELECT number FROM tinsmith_journal.trainers WHERE id = $1 AND pid IS NULL FOR SHARE", trainer_id
        )
        if number is None:
            raise NotReady(f"trainer {trainer_id!r} is not fenced; try again")
        status = self._run(
            self._connected.execute(
                "UPDATE tinsmith_journal.models SET trainer = $3 "
                "WHERE model_id = $1 AND trainer = $2 AND state <> 'moved'",
                *(model_id, number, self._number),
            )
        )
        return status == "UPDATE 1"

    def compact(self) -> None:
        """Does nothing: autovacuum frees the space."""

    def close(self) -> None:
        if self._connection is not None and not self._connection.is_closed():
            with suppress(Exception):
                self._run(self._connection.close(timeout=2.0))
        self._drop()
        with suppress(Exception):
            self._loop.run_until_complete(asyncio.sleep(0))  # lets the transport close
        self._loop.close()

    def is_outage(self, error: Exception) -> bool:
        code = getattr(error, "sqlstate", None)
        if code is not None:
            found = code == _TOO_MANY_CONNECTIONS or code[:2] in _PASSING
        else:
            found = isinstance(error, OSError | TimeoutError | _Unreachable) or self._is_gone
        if found:
            self._drop()
        return found

    def in_words(self, error: Exception) -> ServiceError:
        text = str(error) or type(error).__name__
        code = getattr(error, "sqlstate", None) or ""
        if code in _FULL or isinstance(error, MemoryError):
            return OutOfCapacity(f"the journal cannot be written: {text}")
        if isinstance(error, OverflowError | ValueError | EncodeError) or code[:2] in _TOO_LARGE:
            return Unstorable(f"the journal {self.name} cannot hold it: {text}")
        if self.is_outage(error):
            return NotReady(f"the journal {self.name} cannot be reached: {text}; try again")
        if code[:2] == _DAMAGED:
            return ServiceError(f"the journal {self.name} is damaged: {text}; restore the database from a backup")
        return ServiceError(f"internal error at the journal {self.name}: {error!r}; the log has the cause")

    # The connection

    @property
    def _connected(self) -> asyncpg.Connection:
        if self._connection is None:
            raise _Unreachable("the connection is lost")
        return self._connection

    @property
    def _is_gone(self) -> bool:
        return self._connection is None or self._connection.is_closed()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)

    def _drop(self) -> None:
        """Ends the connection at once. The next transaction connects again."""
        if self._connection is not None:
            with suppress(Exception):
                self._connection.terminate()
            self._connection = None

    def _connect(self) -> None:
        import asyncpg  # only where the journal is in PostgreSQL; an extra

        async def connect() -> asyncpg.Connection:
            return await asyncpg.connect(
                self._url,
                timeout=_CONNECT_TIMEOUT_S,
                command_timeout=_COMMAND_TIMEOUT_S,
                server_settings=_SETTINGS,
            )

        self._connection = self._run(connect())
        if self._value("SHOW synchronous_commit") == "off":
            self._run(self._connected.execute("SET synchronous_commit = on"))

    def _value(self, statement: str, *values: Any) -> Any:
        return self._run(self._connected.fetchval(statement, *values))

    def _reconnect(self) -> None:
        """Connects again, as the same generation. Raises Superseded, and errors that are outages."""
        try:
            self._connect()
            if self._backend is not None:  # the server process of the lost connection may still hold locks
                self._terminate(*self._backend)
            if not self._enter(self.generation, self.generation):
                raise self._superseded()
        except Superseded:
            raise
        except Exception as error:
            self._drop()
            raise _Unreachable(str(error) or type(error).__name__) from error

    def _superseded(self) -> Superseded:
        with suppress(Exception):
            row = self._run(
                self._connected.fetchrow(
                    "SELECT generation, holder FROM tinsmith_journal.trainers WHERE number = $1", self._number
                )
            )
            if row is not None:
                return Superseded(
                    f"generation {row['generation']} of trainer {self.trainer!r}, {row['holder']}, has taken over the "
                    f"journal {self.name} from this process, which is generation {self.generation}"
                )
        return Superseded(f"another process has taken over the journal {self.name} of trainer {self.trainer!r}")

    # Opening

    def _open(self) -> None:
        self._connect()
        self._make_tables()
        if self._value("SHOW fsync") == "off":
            logger.warning(
                "the journal %s: its server has fsync = off, so a power cut may lose accepted operations", self.name
            )
        self._take_generation()

    def _make_tables(self) -> None:
        """Raises SystemExit for tables of another format."""
        self._run(self._connected.execute(f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK})"))
        if self._value("SELECT to_regclass('tinsmith_journal.about')") is None:
            self._run(self._connected.execute(_SCHEMA))
            about = "INSERT INTO tinsmith_journal.about VALUES ($1, replace(gen_random_uuid()::text, '-', ''))"
            self._run(self._connected.execute(about, FORMAT))
        row = self._run(self._connected.fetchrow("SELECT format, id FROM tinsmith_journal.about"))
        self._run(self._connected.execute("COMMIT"))
        assert row is not None
        if row["format"] != FORMAT:
            raise SystemExit(f"{self.name} has format {row['format']}; this trainer reads format {FORMAT}")
        self.journal_id = row["id"]

    def _take_generation(self) -> None:
        """Takes the next generation once the process of the last one is dead, as far as can be known. Raises
        SystemExit when it is alive."""
        if self._run(self._connected.fetchrow(_LOOK, self.trainer)) is None:
            new = "INSERT INTO tinsmith_journal.trainers (name) VALUES ($1) ON CONFLICT (name) DO NOTHING"
            self._run(self._connected.execute(new, self.trainer))  # would wait for another trainer's transaction
        looked_at, first_seen = time.monotonic(), None
        while True:
            row = self._run(self._connected.fetchrow(_LOOK, self.trainer))
            assert row is not None
            first_seen = first_seen or row["renewed_at"]
            if row["alive"] and row["renewed_at"] != first_seen:
                raise SystemExit(
                    f"cannot open the journal {self.name}: trainer {self.trainer!r} is at work ({row['holder']}). Stop "
                    "it, or give this one another journal_name (TRAINER_JOURNAL_NAME)"
                )
            if not row["alive"] or time.monotonic() - looked_at > self._lease_s:
                if row["alive"]:
                    logger.warning(
                        "trainer %r (%s) has an open connection, but has not renewed its row for %g s: this process "
                        "takes over its journal",
                        *(self.trainer, row["holder"], self._lease_s),
                    )
                    self._terminate(row["pid"], row["backend_start"])
                self._number, self.trainer_id = row["number"], row["id"]
                if self._enter(row["generation"], row["generation"] + 1):
                    return
                first_seen = None  # another process was faster, and may be alive
            time.sleep(_LOOK_S)

    def _enter(self, before: int, generation: int) -> bool:
        """Makes this connection the one of `generation`. Returns False when the last one was not `before`."""
        row = self._run(
            self._connected.fetchrow(
                "UPDATE tinsmith_journal.trainers SET generation = $3, holder = $4, renewed_at = clock_timestamp(), "
                "pid = pg_backend_pid(), backend_start = "
                "(SELECT s.backend_start FROM pg_stat_activity s WHERE s.pid = pg_backend_pid()) "
                "WHERE number = $1 AND generation = $2 RETURNING pid, backend_start",
                *(self._number, before, generation, f"process {os.getpid()} on {socket.gethostname()}"),
            )
        )
        if row is None:
            return False
        self._backend, self.generation = (row["pid"], row["backend_start"]), generation
        self._run(self._connected.execute(_VIEWS.format(number=self._number)))
        return True

    def _terminate(self, pid: int, backend_start: Any) -> None:
        """Ends the server process of an earlier connection, if it is still there."""
        try:
            self._value(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2",
                *(pid, backend_start),
            )
        except Exception as error:
            logger.warning("the connection of an earlier process cannot be ended: %s", error)


class _Unreachable(Exception):
    """The connection is lost, or cannot be made."""


def trainer_names(url: str) -> list[str]:
    """Names of the trainers that have a journal in the database. Raises SystemExit when it cannot be read."""
    import asyncpg

    async def read() -> list[str]:
        connection = await asyncpg.connect(url, timeout=_CONNECT_TIMEOUT_S, command_timeout=_COMMAND_TIMEOUT_S)
        try:
            if await connection.fetchval("SELECT to_regclass('tinsmith_journal.trainers')") is None:
                return []
            return [row[0] for row in await connection.fetch("SELECT name FROM tinsmith_journal.trainers ORDER BY 1")]
        finally:
            await connection.close()

    try:
        return asyncio.run(read())
    except Exception as error:
        raise SystemExit(f"cannot open the journal {described(url)}: {error or type(error).__name__}") from error


@functools.lru_cache(maxsize=256)
def _numbered(statement: str) -> str:
    """The statement with PostgreSQL's $1, $2, ... for each "?"."""
    first, *others = statement.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, start=1))


def _check_sizes(values: Sequence[Any]) -> None:
    if sum(len(value) for value in values if isinstance(value, bytes)) > _MOST_BYTES:
        raise OverflowError(f"PostgreSQL holds at most {_MOST_BYTES} bytes in a row")
