"""The thread that owns the journal's connection. Waiting writes share one transaction (group commit)."""

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

from tinsmith.rpc.errors import NotReady, OutOfCapacity, ServiceError
from trainer_service.durability import journal_file
from trainer_service.durability.journal_bound import Bound
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARES_S = 0.02
"""Time that a job that is not urgent waits for an urgent one, to share its transaction, in seconds."""


class Unstorable(ServiceError):
    """SQLite or protobuf cannot represent a value of the transaction, so trying again would not help."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    done: Future[Any]
    urgent: bool


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
