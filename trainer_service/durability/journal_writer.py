"""The thread that owns the journal's connection, and keeps the journal within its bound.

Waiting writes share one transaction (group commit).
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import EncodeError

from tinsmith.errors import NotReady, OutOfCapacity, ServiceError
from trainer_service.durability import journal_file
from trainer_service.durability.journal_pruning import Sizes, cut_covered, drop_empty, expire
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARES_S = 0.02
"""Time that a job that is not urgent waits for an urgent one, to share its transaction, in seconds."""
_PRUNE_INTERVAL_S = 60.0
_LOW_WATER = 0.9
"""Share of max_bytes down to which the journal is cut, so that not every commit has to cut again."""
_PRESSED = 0.5
"""Share of max_bytes above which a snapshot is taken at every step."""


class Unstorable(ServiceError):
    """SQLite or protobuf cannot represent a value of the transaction, so trying again would not help."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    done: Future[Any]
    urgent: bool


class Bound:
    """The journal's size and its limit. Only `is_pressed` is used outside the writer's thread.

    Above the limit, bodies that a snapshot covers are cut first, then results, then bodies that a replay would need.
    Bodies of operations that have not run are never cut.
    """

    def __init__(self, sizes: Sizes, *, max_bytes: int, result_retention_s: float) -> None:
        self.sizes = sizes
        """Bytes in the journal. Code that adds or deletes rows updates it in the same transaction."""
        self.max_bytes = max_bytes
        self._result_retention_s = result_retention_s
        self._next_prune = 0.0

    @property
    def is_pressed(self) -> bool:
        return self.sizes.total > self.max_bytes * _PRESSED

    def prune(self, connection: sqlite3.Connection) -> None:
        """Deletes expired results and models that ended long ago, at most once a minute. Above the bound it runs at
        once, and cuts more, in the order that the class's docstring has."""
        if time.time() < self._next_prune and self.sizes.total <= self.max_bytes:
            return
        self._next_prune = time.time() + _PRUNE_INTERVAL_S
        expire(connection, before=time.time() - self._result_retention_s)
        self.sizes = Sizes.of(connection)
        if self.sizes.total > self.max_bytes:
            cut_covered(connection)
            self.sizes = Sizes.of(connection)
            self._cut_results(connection)
            self._cut_needed_bodies(connection)
        drop_empty(connection)

    def cut_up_to(self, connection: sqlite3.Connection, model_id: str, seq_id: int) -> None:
        """Cuts a model's bodies up to that of the operation `seq_id`."""
        (num_bytes,) = connection.execute(
            "SELECT coalesce(sum(length(request)), 0) FROM operations WHERE model_id = ? AND seq_id <= ?",
            (model_id, seq_id),
        ).fetchone()
        connection.execute(
            "UPDATE operations SET request = NULL WHERE model_id = ? AND seq_id <= ?", (model_id, seq_id)
        )
        connection.execute("UPDATE models SET cut_seq_id = ? WHERE model_id = ?", (seq_id, model_id))
        self.sizes.total -= num_bytes

    def _cut_results(self, connection: sqlite3.Connection) -> None:
        rows = self._oldest(
            connection, "SELECT id, model_id, seq_id, length(result) FROM operations WHERE result IS NOT NULL"
        )
        connection.executemany("UPDATE operations SET result = NULL WHERE id = ?", [(row[0],) for row in rows])
        if rows:
            logger.warning("cut %d results from the journal before they expired", len(rows))

    def _cut_needed_bodies(self, connection: sqlite3.Connection) -> None:
        rows = self._oldest(
            connection,
            "SELECT id, model_id, seq_id, length(request) FROM operations WHERE request IS NOT NULL AND seq_id > 0",
        )
        connection.executemany("UPDATE operations SET request = NULL WHERE id = ?", [(row[0],) for row in rows])
        connection.executemany(
            "UPDATE models SET cut_seq_id = max(cut_seq_id, ?) WHERE model_id = ?", [(row[2], row[1]) for row in rows]
        )
        if rows:
            logger.warning(
                "the journal is full (journal_max_bytes %d) and %d executed operations since the last snapshot were "
                "cut from it: until their next optim_step a crash loses the models %s",
                self.max_bytes,
                len(rows),
                ", ".join(sorted({row[1] for row in rows})),
            )

    def _oldest(self, connection: sqlite3.Connection, select: str) -> list[tuple[int, str, int, int]]:
        """Selects executed operations to cut, the oldest first, until the journal would be below _LOW_WATER.

        `select`: a query for (id, model_id, seq_id, bytes to be cut).
        """
        chosen: list[tuple[int, str, int, int]] = []
        for row in connection.execute(f"{select} AND state != 0 ORDER BY id"):
            if self.sizes.total <= self.max_bytes * _LOW_WATER:
                break
            self.sizes.total -= row[3]
            chosen.append(row)
        return chosen


class Writer:
    """Runs jobs from its creation until `close`, which waits for all submitted jobs and closes the connection."""

    def __init__(self, connection: sqlite3.Connection, bound: Bound, metrics: Metrics, *, path: Path) -> None:
        self._path = path
        self._connection = connection
        self._bound = bound
        self._metrics = metrics
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._closing:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    async def submit(self, run: Callable[[sqlite3.Connection], T], *, urgent: bool = True) -> T:
        """Calls `run` on the writer's thread. Returns its result once the transaction is on disk.

        `run` may be called twice; the first call's changes are then rolled back. It may raise a ServiceError, which is
        raised here, but only before it writes. A job that is not urgent may take 20 ms longer; it mostly shares another
        job's write to the disk.

        Raises OutOfCapacity when the disk does not take the transaction, Unstorable when no disk would, NotReady after
        `close`, and a plain ServiceError for a damaged journal and for any other error of `run`.
        """
        done: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise NotReady("the journal is closed: the trainer is going down")
            self._jobs.put(_Job(run, done, urgent))
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        """The writer's thread: runs all waiting jobs in one transaction, again and again."""
        while jobs := self._take():
            self._commit(jobs)
        self._connection.close()

    def _take(self) -> list[_Job]:
        """Waits for jobs, and returns them once one is urgent or has waited for _SHARES_S. Returns none when the thread
        is to end."""
        jobs: list[_Job] = []
        latest = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, latest - time.monotonic())) if jobs else self._jobs.get()
            except queue.Empty:
                return jobs
            if job is None:
                if jobs:
                    self._jobs.put(None)
                return jobs
            if job.urgent:
                latest = 0.0
            elif not jobs:
                latest = time.monotonic() + _SHARES_S
            jobs.append(job)

    def _commit(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        outcomes = self._attempt(jobs, prune=True)
        if isinstance(outcomes, ServiceError):  # jobs that only read, or are small enough, may succeed alone
            outcomes = [self._alone(job) for job in jobs]
        self._metrics.durability.journal_commit_seconds.observe(time.perf_counter() - started)
        self._metrics.durability.journal_bytes.set(self._bound.sizes.total)
        for job, outcome in outcomes:
            if not job.done.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, ServiceError):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)

    def _alone(self, job: _Job) -> tuple[_Job, Any]:
        outcomes = self._attempt([job])
        return (job, outcomes) if isinstance(outcomes, ServiceError) else outcomes[0]

    def _attempt(self, jobs: list[_Job], *, prune: bool = False) -> list[tuple[_Job, Any]] | ServiceError:
        """Runs jobs in one transaction. Returns their outcomes, or the error after which it was rolled back."""
        sizes = replace(self._bound.sizes)
        outcomes: list[tuple[_Job, Any]] = []
        try:
            if self._connection.in_transaction:  # an earlier transaction that could not be rolled back
                self._connection.execute("ROLLBACK")
            self._connection.execute("BEGIN")
            for job in jobs:
                try:
                    outcomes.append((job, job.run(self._connection)))
                except ServiceError as error:  # the job refused before it wrote anything
                    outcomes.append((job, error))
            if prune:
                self._bound.prune(self._connection)
            self._connection.execute("COMMIT")
        except Exception as error:  # no error may end this thread: every later caller would wait for ever
            logger.exception("a transaction of %d journal jobs failed", len(jobs))
            try:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            except sqlite3.Error:
                logger.exception("the transaction cannot be rolled back now; this is tried again before the next one")
            self._bound.sizes = sizes
            self._metrics.durability.journal_failures.inc()
            return self._in_words(error)
        return outcomes

    def _in_words(self, error: Exception) -> ServiceError:
        """The ServiceError for an error of a transaction."""
        if journal_file.passes(error) or isinstance(error, MemoryError):
            return OutOfCapacity(f"the journal cannot be written: {str(error) or 'no memory is left'}")
        if isinstance(error, sqlite3.DataError | OverflowError | EncodeError):
            return Unstorable(f"the journal {self._path} cannot hold it: {error}")
        # These classes are about the file; the other subclasses of DatabaseError are about one statement.
        if type(error) in (sqlite3.DatabaseError, sqlite3.OperationalError, UnicodeDecodeError):
            return ServiceError(journal_file.damaged(self._path, error))
        return ServiceError(f"internal error at the journal {self._path}: {error!r}; the log has the cause")
