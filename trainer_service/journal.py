"""The journal: what was asked of the trainer, in order, and what was answered. SQLite, durable at every commit.

Format (PRAGMA user_version 1), enough to replay a model after a crash:

    models      one row for each model: state "live", "lost" (the trainer restarted without it) or "failed" (its
                creation failed); replayable = 0 once the body of an executed operation was cut to keep the bounds.
    operations  one row for each accepted operation. (model_id, seq_id) is its identity, and seq_id its place in the
                model's order. Operation 0 is the creation, whose body says how the model was made; it is never cut.
                kind    a field name of WaitResultResponse, such as "forward_backward"
                digest  XXH3-128 of kind and body: tells a repeat from a conflict
                request the body: zstd of the serialized request message of that kind; NULL once cut
                state   0 accepted, 1 done, 2 failed
                result  serialized WaitResultResponse (done) or google.rpc.Status (failed); NULL until then, and once
                        expired

One thread owns the connection. Writes that wait share one transaction (group commit), and a write returns only when
that transaction is on disk. The file is locked: a second trainer on the same journal is refused.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import xxhash
import zstandard
from google.protobuf.message import Message
from google.rpc import status_pb2

from tinsmith.rpc import errors
from tinsmith.rpc.errors import ModelLost, ModelNotFound, OutOfCapacity, ServiceError
from tinsmith.v1 import trainer_pb2
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
_PRUNE_INTERVAL_S = 60.0
_LOW_WATER = 0.9
"""Fraction of max_bytes that cutting bodies goes down to, so that it does not run at every commit."""

_SCHEMA = """
CREATE TABLE models (
    model_id TEXT PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'live',
    replayable INTEGER NOT NULL DEFAULT 1,
    created_at REAL NOT NULL,
    ended_at REAL
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
    UNIQUE (model_id, seq_id)
) STRICT;
CREATE INDEX expiring ON operations (finished_at) WHERE result IS NOT NULL;
"""


class State(IntEnum):
    ACCEPTED = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Body:
    """A request as it lies in the journal."""

    kind: str
    digest: bytes
    compressed: bytes

    @classmethod
    def pack(cls, kind: str, request: Message) -> Body:
        data = request.SerializeToString(deterministic=True)
        digest = xxhash.xxh3_128(kind.encode() + b"\0")
        digest.update(data)
        return cls(kind, digest.digest(), zstandard.ZstdCompressor(level=1).compress(data))

    def unpack(self) -> bytes:
        """The serialized request."""
        return zstandard.ZstdDecompressor().decompress(self.compressed)


@dataclass(frozen=True, slots=True)
class Record:
    """An accepted operation."""

    kind: str
    digest: bytes
    outcome: trainer_pb2.WaitResultResponse | ServiceError | None
    """None while it is not finished, and when its result has expired."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    done: Future[Any]


class Journal:
    """Opened once. The coroutines may be called from one event loop; `close` waits for what was asked before it."""

    def __init__(self, path: Path, *, max_bytes: int, result_retention_s: float, metrics: Metrics) -> None:
        self._max_bytes = max_bytes
        self._result_retention_s = result_retention_s
        self._metrics = metrics
        metrics.journal_limit_bytes.set(max_bytes)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._next_prune = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = _connect(path)
        self._num_bytes: int = self._connection.execute(
            "SELECT coalesce(sum(coalesce(length(request), 0) + coalesce(length(result), 0)), 0) FROM operations"
        ).fetchone()[0]
        self._pending_bytes: int = self._connection.execute(
            "SELECT coalesce(sum(length(request)), 0) FROM operations WHERE state = 0"
        ).fetchone()[0]
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def lose_models(self) -> int:
        """Called at start: models that were live are not held any more. Returns how many there were."""

        def run(connection: sqlite3.Connection) -> int:
            now = time.time()
            live = connection.execute("SELECT model_id FROM models WHERE state = 'live'").fetchall()
            for (model_id,) in live:
                status = errors.to_proto(_lost(model_id)).SerializeToString()
                connection.execute(
                    "UPDATE operations SET state = ?, result = ?, finished_at = ? WHERE model_id = ? AND state = 0",
                    (State.FAILED, status, now, model_id),
                )
            connection.execute("UPDATE models SET state = 'lost', ended_at = ? WHERE state = 'live'", (now,))
            self._pending_bytes = 0
            return len(live)

        return await self._submit(run)

    async def append(self, model_id: str, seq_id: int, body: Body) -> None:
        """Returns when the operation is on disk. Operation 0 makes the model's row.

        The caller sees to it that the operation is new. Raises OutOfCapacity when the disk or the journal is full.
        """

        def run(connection: sqlite3.Connection) -> None:
            num_bytes = len(body.compressed)
            if self._pending_bytes + num_bytes > self._max_bytes:
                raise OutOfCapacity(
                    f"the journal holds {self._pending_bytes} bytes of operations that have not run; "
                    f"{num_bytes} more are above journal_max_bytes {self._max_bytes}"
                )
            now = time.time()
            if seq_id == 0:
                connection.execute("INSERT INTO models (model_id, created_at) VALUES (?, ?)", (model_id, now))
            elif not connection.execute("SELECT 1 FROM models WHERE model_id = ?", (model_id,)).fetchone():
                raise ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id)
            connection.execute(
                "INSERT INTO operations (model_id, seq_id, kind, digest, request, accepted_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (model_id, seq_id, body.kind, body.digest, body.compressed, now),
            )
            self._pending_bytes += num_bytes
            self._num_bytes += num_bytes

        await self._submit(run)

    async def finish(self, model_id: str, seq_id: int, outcome: trainer_pb2.WaitResultResponse | ServiceError) -> None:
        """Stores the answer. Nothing happens when the model was deleted meanwhile."""

        def run(connection: sqlite3.Connection) -> None:
            failed = isinstance(outcome, ServiceError)
            message = errors.to_proto(outcome) if isinstance(outcome, ServiceError) else outcome
            result = message.SerializeToString()
            row = connection.execute(
                "UPDATE operations SET state = ?, result = ?, finished_at = ? WHERE model_id = ? AND seq_id = ? "
                "RETURNING length(request)",
                (State.FAILED if failed else State.DONE, result, time.time(), model_id, seq_id),
            ).fetchone()
            if row is not None:
                self._pending_bytes -= row[0]
                self._num_bytes += len(result)
            if failed and seq_id == 0:
                connection.execute(
                    "UPDATE models SET state = 'failed', ended_at = ? WHERE model_id = ?", (time.time(), model_id)
                )

        await self._submit(run)

    async def find(self, model_id: str, seq_id: int) -> Record | None:
        """The operation, or None when it was never accepted or nothing of it is left."""

        def run(connection: sqlite3.Connection) -> tuple[str, bytes, int, bytes | None] | None:
            return connection.execute(
                "SELECT kind, digest, state, result FROM operations WHERE model_id = ? AND seq_id = ?",
                (model_id, seq_id),
            ).fetchone()

        row = await self._submit(run)
        if row is None:
            return None
        kind, digest, state, result = row
        if result is None:
            return Record(kind, digest, None)
        if state == State.FAILED:
            return Record(kind, digest, errors.from_proto(status_pb2.Status.FromString(result)))
        return Record(kind, digest, trainer_pb2.WaitResultResponse.FromString(result))

    async def requests(self, model_id: str) -> list[tuple[int, Body]]:
        """The operations of a model whose bodies are kept, by seq_id: what a replay executes."""

        def run(connection: sqlite3.Connection) -> list[tuple[int, str, bytes, bytes]]:
            return connection.execute(
                "SELECT seq_id, kind, digest, request FROM operations "
                "WHERE model_id = ? AND request IS NOT NULL ORDER BY seq_id",
                (model_id,),
            ).fetchall()

        return [(seq_id, Body(kind, digest, request)) for seq_id, kind, digest, request in await self._submit(run)]

    async def is_replayable(self, model_id: str) -> bool:
        """True when `requests` is complete from the creation on."""
        row = await self._submit(
            lambda connection: connection.execute(
                "SELECT replayable FROM models WHERE model_id = ?", (model_id,)
            ).fetchone()
        )
        return row is not None and bool(row[0])

    async def check_not_lost(self, model_id: str) -> None:
        """Raises ModelLost for a model that an earlier process held."""
        row = await self._submit(
            lambda connection: connection.execute("SELECT state FROM models WHERE model_id = ?", (model_id,)).fetchone()
        )
        if row is not None and row[0] == "lost":
            raise _lost(model_id)

    async def delete_model(self, model_id: str) -> None:
        """Removes the model and its operations; an unknown one is no error."""

        def run(connection: sqlite3.Connection) -> None:
            pending, total = connection.execute(
                "SELECT coalesce(sum(CASE state WHEN 0 THEN length(request) END), 0), "
                "coalesce(sum(coalesce(length(request), 0) + coalesce(length(result), 0)), 0) "
                "FROM operations WHERE model_id = ?",
                (model_id,),
            ).fetchone()
            connection.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
            self._pending_bytes -= pending
            self._num_bytes -= total

        await self._submit(run)

    async def _submit(self, run: Callable[[sqlite3.Connection], T]) -> T:
        done: Future[T] = Future()
        self._jobs.put(_Job(run, done))
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        """The writer thread: everything that waits goes into one transaction."""
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            while not self._jobs.empty():
                following = self._jobs.get()
                if following is None:
                    self._jobs.put(None)
                    break
                jobs.append(following)
            self._commit(jobs)
        self._connection.close()

    def _commit(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        counts = self._pending_bytes, self._num_bytes
        outcomes: list[tuple[_Job, Any]] = []
        try:
            self._connection.execute("BEGIN")
            for job in jobs:
                try:
                    outcomes.append((job, job.run(self._connection)))
                except ServiceError as error:  # refused before anything was written
                    outcomes.append((job, error))
            self._prune()
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            logger.exception("a transaction of %d journal jobs failed", len(jobs))
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._pending_bytes, self._num_bytes = counts
            self._metrics.journal_failures.inc()
            failure = OutOfCapacity(f"the journal cannot be written: {error}")
            outcomes = [(job, failure) for job in jobs]
        self._metrics.journal_commit_seconds.observe(time.perf_counter() - started)
        self._metrics.journal_bytes.set(self._num_bytes)
        for job, outcome in outcomes:
            if not job.done.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, ServiceError):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)

    def _prune(self) -> None:
        """Forgets expired results and long ended models; above the bound cuts the oldest bodies, then results."""
        if time.time() < self._next_prune and self._num_bytes <= self._max_bytes:
            return
        self._next_prune = time.time() + _PRUNE_INTERVAL_S
        horizon = time.time() - self._result_retention_s
        execute = self._connection.execute
        execute("DELETE FROM models WHERE ended_at < ?", (horizon,))
        execute("UPDATE operations SET result = NULL WHERE result IS NOT NULL AND finished_at < ?", (horizon,))
        self._num_bytes = execute(
            "SELECT coalesce(sum(coalesce(length(request), 0) + coalesce(length(result), 0)), 0) FROM operations"
        ).fetchone()[0]
        if self._num_bytes > self._max_bytes:
            self._cut_bodies()
            self._cut_results()
        execute("DELETE FROM operations WHERE state != 0 AND request IS NULL AND result IS NULL")

    def _cut_bodies(self) -> None:
        rows = self._oldest(
            "SELECT id, model_id, length(request) FROM operations WHERE request IS NOT NULL AND seq_id > 0"
        )
        self._connection.executemany("UPDATE operations SET request = NULL WHERE id = ?", [(row[0],) for row in rows])
        models = {row[1] for row in rows}
        self._connection.executemany("UPDATE models SET replayable = 0 WHERE model_id = ?", [(m,) for m in models])
        logger.info("cut the bodies of %d executed operations of %d models from the journal", len(rows), len(models))

    def _cut_results(self) -> None:
        rows = self._oldest("SELECT id, model_id, length(result) FROM operations WHERE result IS NOT NULL")
        self._connection.executemany("UPDATE operations SET result = NULL WHERE id = ?", [(row[0],) for row in rows])
        if rows:
            logger.warning("cut %d results from the journal before they expired", len(rows))

    def _oldest(self, select: str) -> list[tuple[int, str, int]]:
        """Executed operations to cut, oldest first, as many as bring the journal well below its bound."""
        chosen: list[tuple[int, str, int]] = []
        for row in self._connection.execute(f"{select} AND state != 0 ORDER BY id"):
            if self._num_bytes <= self._max_bytes * _LOW_WATER:
                break
            self._num_bytes -= row[2]
            chosen.append(row)
        return chosen


def _connect(path: Path) -> sqlite3.Connection:
    # Without "powersafe overwrite" SQLite fills the last sector of each transaction with a copy of its last page: one
    # torn by a power cut, while the next is written, takes nothing with it that was acknowledged.
    uri = f"{path.absolute().as_uri()}?psow=0"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            raise SystemExit(f"{path} has format {version}; this trainer reads format {FORMAT}")
    except sqlite3.OperationalError as error:
        connection.close()
        raise SystemExit(f"cannot open the journal {path}: {error}. Is another trainer running on it?") from None
    return connection


def _lost(model_id: str) -> ModelLost:
    return ModelLost(
        f"{model_id}: the trainer restarted and does not hold this model any more; resume from a checkpoint "
        "(create_training_client_from_state)",
        model_id=model_id,
    )
