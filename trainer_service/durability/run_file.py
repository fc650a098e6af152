"""The run file: the journal's rows of one model, in a file that travels to another trainer's journal.

It is a SQLite file with the tables of journal_file.py and one more, `move`, which has the id of the move and of the
trainer that takes the model over. It has all answers, and the bodies of those operations that the model's snapshot does
not cover.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import DataCorrupted
from trainer_service.durability import journal_file

INSERT = (
    "INSERT INTO operations (seq_id, kind, digest, request, state, result, accepted_at, finished_at, request_sum, "
    "result_sum, model_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
"""Statement that adds an operation. Its values are a row of SELECT, then the model's id."""
SELECT = (
    "SELECT seq_id, kind, digest, CASE WHEN seq_id > ? THEN request END, state, result, accepted_at, finished_at, "
    "request_sum, result_sum FROM operations WHERE model_id = ? AND seq_id BETWEEN ? AND ? ORDER BY seq_id"
)
"""Statement that reads some of a model's operations. Bodies of operations that its snapshot covers are left out. Its
values: the last seq_id that the snapshot covers, the model's id, and the first and the last seq_id to read."""
_ALL = (
    "SELECT seq_id, kind, digest, request, state, result, accepted_at, finished_at, request_sum, result_sum "
    "FROM operations ORDER BY seq_id"
)
CHUNK_BYTES = 8 * 1024 * 1024
"""Most bytes of requests and results that are read into memory at once. A larger operation is read by itself."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a model to another trainer."""

    move_id: str
    trainer_id: str
    """The trainer that takes the model over."""

    def __str__(self) -> str:
        """The form in which the journal stores it."""
        return f"{self.move_id} {self.trainer_id}"

    @classmethod
    def parse(cls, text: str) -> Move:
        move_id, _, trainer_id = text.partition(" ")
        return cls(move_id, trainer_id)


def create(path: Path, model_id: str, move: Move, *, created_at: float, snapshot_seq_id: int) -> None:
    """Makes a file without operations. `created_at`: creation of the model, in seconds since 1970. `snapshot_seq_id`:
    seq_id of the last operation that the model's snapshot covers."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(
            f"BEGIN; {journal_file.SCHEMA} CREATE TABLE move (move_id TEXT, trainer_id TEXT) STRICT; "
            f"PRAGMA user_version = {journal_file.FORMAT}; COMMIT;"
        )
        database.execute("INSERT INTO move VALUES (?, ?)", (move.move_id, move.trainer_id))
        database.execute(
            "INSERT INTO models (model_id, created_at, cut_seq_id, snapshot_seq_id) VALUES (?, ?, ?, ?)",
            (model_id, created_at, snapshot_seq_id, snapshot_seq_id),
        )


def add(path: Path, model_id: str, rows: Iterable[Sequence[Any]]) -> None:
    """Adds operations to a file. `rows`: rows of SELECT."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executemany(INSERT, ((*row, model_id) for row in rows))


def move_of(path: Path, model_id: str) -> tuple[Move, float, int]:
    """The move, and `created_at` and `snapshot_seq_id` as `create` got them. Raises DataCorrupted."""
    with _reading(path) as database:
        if (version := database.execute("PRAGMA user_version").fetchone()[0]) != journal_file.FORMAT:
            raise DataCorrupted(f"{path.name} of {model_id} has format {version}, not {journal_file.FORMAT}")
        row = database.execute(
            "SELECT move_id, trainer_id, created_at, snapshot_seq_id FROM models, move WHERE model_id = ?", (model_id,)
        ).fetchone()
    if row is None:
        raise DataCorrupted(f"{path.name} has no model {model_id!r}")
    return Move(*row[:2]), row[2], row[3]


def chunks(path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """Yields all operations in the order of seq_id, as rows of SELECT, up to CHUNK_BYTES at a time. Raises
    DataCorrupted."""
    with _reading(path) as database:
        chunk: list[tuple[Any, ...]] = []
        num_bytes = 0
        for row in database.execute(_ALL):
            size = sum(len(value) for value in row if isinstance(value, bytes))
            if chunk and num_bytes + size > CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(row)
            num_bytes += size
        if chunk:
            yield chunk


def check(path: Path) -> None:
    """Raises DataCorrupted when an operation cannot be read."""
    for _ in chunks(path):
        pass


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A context that opens the file for reading. An error of SQLite within the context becomes DataCorrupted."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        try:
            yield database
        except sqlite3.Error as error:
            raise DataCorrupted(f"{path.name} cannot be read: {error}") from error
