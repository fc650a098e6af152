"""The journal in a SQLite file: its tables, how it is opened, and its errors. A Database of journal_database.py.

Format 3 (PRAGMA user_version), enough to replay a model after a crash:

    models      one row for each model: state "live", "lost" (it could not be restored; `reason` says why), "failed"
                (its creation failed) or "moved" (released for another trainer; `reason` has the move). `snapshot_*`:
                the newest durable snapshot, which covers every operation up to snapshot_seq_id. Bodies up to cut_seq_id
                may have been cut (-1: none has), so only a snapshot after cut_seq_id or a later operation can restore
                the model.
    operations  one row for each accepted operation. (model_id, seq_id) is its identity, and seq_id its place in the
                model's order. Operation 0 is the creation, whose body says how the model was made.
                kind    a field name of WaitResultResponse, such as "forward_backward"
                digest  XXH3-128 of kind and body: distinguishes a repeat from a conflict
                request the body: zstd of the serialized request message of that kind; NULL once cut, and for an
                        executed operation that did not change the model, such as a save
                state   0 accepted, 1 done, 2 failed
                result  serialized WaitResultResponse (done) or google.rpc.Status (failed); NULL until then, and once
                        expired
                request_sum, result_sum
                        XXH3-64 of request or result and its place (`sum_of`), because SQLite does not notice a
                        changed byte

Rows above cut_seq_id are kept while their model lives: together they are its history.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from google.protobuf.message import EncodeError

from tinsmith.errors import FailedPrecondition, OutOfCapacity, ServiceError
from trainer_service.durability.journal_database import Unstorable

FORMAT = 3
NAME = "journal.sqlite"

_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
"""SQLite's result codes for problems of the disk or of a lock, which may pass."""
_COLUMNS = "SELECT t.name, c.name FROM sqlite_master t JOIN pragma_table_info(t.name) c WHERE t.type = 'table'"

SCHEMA = """
CREATE TABLE models (
    model_id TEXT PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'live',
    created_at REAL NOT NULL,
    ended_at REAL,
    reason TEXT NOT NULL DEFAULT '',
    cut_seq_id INTEGER NOT NULL DEFAULT -1,
    snapshot_seq_id INTEGER,
    snapshot_at REAL,
    snapshot_bytes INTEGER
) STRICT;
CREATE TABLE operations (
    id INTEGER PRIMARY KEY,
    model_id TEXT NOT NULL REFERENCES models ON DELETE CASCADE,
    seq_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    digest BLOB NOT NULL,
    request BLOB,
    state INTEGER NOT NULL DEFAULT 0,
    result BLOB,
    accepted_at REAL NOT NULL,
    finished_at REAL,
    request_sum BLOB,
    result_sum BLOB,
    UNIQUE (model_id, seq_id)
) STRICT;
CREATE INDEX expiring ON operations (finished_at) WHERE result IS NOT NULL;
"""


class JournalFile(sqlite3.Connection):
    """An open journal, which no other process can open."""

    path: Path
    renew_s: float | None = None
    journal_id = ""
    all_model_ids = "SELECT model_id FROM models"
    delete_moved: str | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def fence(self, trainer_id: str) -> None:
        raise _not_shared("trainer_id", trainer_id)

    def take_over(self, model_id: str, trainer_id: str) -> bool:
        raise _not_shared("fenced_trainer_id", trainer_id)

    def begin(self) -> None:
        if self.in_transaction:  # an earlier transaction that could not be rolled back
            self.rollback()
        self.execute("BEGIN")

    def is_outage(self, error: Exception) -> bool:
        return False

    def compact(self) -> None:
        self.execute("VACUUM")

    def in_words(self, error: Exception) -> ServiceError:
        if passes(error) or isinstance(error, MemoryError):
            return OutOfCapacity(f"the journal cannot be written: {str(error) or 'no memory is left'}")
        if isinstance(error, sqlite3.DataError | OverflowError | EncodeError):
            return Unstorable(f"the journal {self.path} cannot hold it: {error}")
        # These classes are about the file; the other subclasses of DatabaseError are about one statement.
        if type(error) in (sqlite3.DatabaseError, sqlite3.OperationalError, UnicodeDecodeError):
            return ServiceError(damaged(self.path, error))
        return ServiceError(f"internal error at the journal {self.path}: {error!r}; the log has the cause")


def connect(path: Path) -> JournalFile:
    """Opens and locks the journal. Creates it if it does not exist.

    Raises SystemExit, which says what to do, for a journal that another process has open, that is damaged, or that has
    another format.
    """
    # With psow=0 ("powersafe overwrite" off) SQLite pads each transaction to a full sector. So a power cut during the
    # next transaction cannot damage a sector with acknowledged data.
    uri = f"{path.absolute().as_uri()}?psow=0"
    with suppress(OSError):  # SQLite's own error, below, is clearer
        path.touch(mode=0o600)  # the journal holds training data
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0, factory=JournalFile
    )
    connection.path = path
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        _check(connection)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(f"BEGIN EXCLUSIVE; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            raise SystemExit(f"{path} has format {version}; this trainer reads format {FORMAT}")
        _check_columns(connection)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # UnicodeDecodeError: SQLite quotes damaged text
        connection.close()
        if passes(error):
            raise SystemExit(f"cannot open the journal {path}: {error}. Is another trainer running on it?") from None
        raise SystemExit(damaged(path, error)) from None
    return connection


def passes(error: Exception) -> bool:
    """True for an error of the disk, its space or a lock: the same statement may succeed later."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING


def damaged(path: Path, error: Exception) -> str:
    """The error message for a damaged journal: says what is wrong, and what an operator can do."""
    return (
        f"the journal {path} is damaged: {error}. What a crash or a power cut leaves is repaired without this "
        "message; this is the disk, or another program. Put a backup of the whole folder in its place, or move the "
        "folder away to start without its models; checkpoints lie elsewhere and are not affected"
    )


def _check(connection: sqlite3.Connection) -> None:
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _check_columns(connection: sqlite3.Connection) -> None:
    """Raises DatabaseError when a column is missing: SQLite's own check does not notice a changed name."""
    with closing(sqlite3.connect(":memory:")) as new:
        new.executescript(SCHEMA)
        missing = {*new.execute(_COLUMNS)} - {*connection.execute(_COLUMNS)}
    if missing:
        raise sqlite3.DatabaseError(f"there is no column {'.'.join(min(missing))}")


def _not_shared(field: str, trainer_id: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{field}: the journal of this trainer is a file, so it cannot adopt the models of {trainer_id!r}", field=field
    )
