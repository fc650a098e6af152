"""The interface between the journal and the database that holds its rows. There are two: journal_file.py (SQLite) and
journal_postgres.py.

The statements are the journal's own, in the SQL that both databases understand, with "?" for values. The tables are
described in journal_file.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tinsmith.errors import NotReady, ServiceError


class Unstorable(ServiceError):
    """The database or protobuf cannot represent a value of the transaction, so trying again would not help."""


class Superseded(NotReady):
    """Another trainer has taken over this trainer's journal. This process must end: nothing that it does counts."""


class Rows(Protocol):
    """The result of a statement. sqlite3.Cursor is one."""

    @property
    def rowcount(self) -> int:
        """Number of rows that an INSERT, UPDATE or DELETE has changed."""
        ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """An open journal. One thread at a time calls its methods."""

    renew_s: float | None
    """Pause, in seconds, after which an idle journal makes an empty transaction, which shows that the trainer lives.
    None means that this is not needed."""
    journal_id: str
    """Random id of the tables, where several trainers share them; empty for a file."""
    all_model_ids: str
    """Statement for the ids of the models of all trainers that share the database."""
    delete_moved: str | None
    """Statement that deletes what another trainer in the same database has of a model, if it has released the model.
    None where no other trainer uses the tables."""

    @property
    def name(self) -> str:
        """The file or the database, for messages; without secrets."""
        ...

    def fence(self, trainer_id: str) -> None:
        """Within a transaction: supersedes the last process of another trainer of the database, which is dead. Its
        models can be taken until it is started again.

        Raises NotReady when the trainer is alive, and FailedPrecondition when the database has no other trainer of this
        id.
        """
        ...

    def take_over(self, model_id: str, trainer_id: str) -> bool:
        """Within a transaction: makes a model of a fenced trainer this trainer's own. False when that trainer has no
        such model, or has released it. Raises NotReady when it was started again."""
        ...

    def begin(self) -> None:
        """Begins a transaction, after it has ended an earlier one that could not be rolled back. Connects again if the
        connection is lost. Raises Superseded."""
        ...

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows: ...

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> object: ...

    def commit(self) -> None:
        """Returns when the transaction is on disk."""
        ...

    def rollback(self) -> None:
        """Ends the transaction, if there is one."""
        ...

    def compact(self) -> None:
        """Returns the space of deleted rows to the disk, where the database does not do so by itself."""
        ...

    def close(self) -> None: ...

    def is_outage(self, error: Exception) -> bool:
        """True for an error of a transaction after which the database may soon be there again. It is unknown whether
        the transaction took place."""
        ...

    def in_words(self, error: Exception) -> ServiceError:
        """The ServiceError for an error of a transaction: OutOfCapacity when there is no room, Unstorable when a value
        cannot be represented, NotReady in an outage, and a plain ServiceError for damage and any other error."""
        ...
