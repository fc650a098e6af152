"""The thread that owns the journal's connection: what waits shares one transaction (group commit)."""

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
"""How long a job that is not urgent waits for one that is, to share its transaction."""


class Unstorable(ServiceError):
    """SQLite or protobuf has no place for a value of the transaction: it fails however often it is tried."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    done: Future[Any]
    urgent: bool


class Writer:
    """Runs from its making until `close`, which waits for what was submitted before and closes the connection."""

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
        """What `run` gives, once its transaction is on disk. It may run twice: the first time is rolled back then.

        What is not urgent takes up to 20 ms more, and mostly no write to the disk of its own.
        A ServiceError of `run` is raised here, and must come before it writes. Raises OutOfCapacity when the disk
        does not take the transaction, Unstorable when no disk would, NotReady after `close`, and a plain ServiceError
        for a damaged journal and for whatever else `run` raises.
        """
        done: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise NotReady("the journal is closed: the trainer is going down")
            self._jobs.put(_Job(run, done, urgent))
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        """The writer thread: everything that waits goes into one transaction."""
        while jobs := self._take():
            self._commit(jobs)
        self._connection.close()

    def _take(self) -> list[_Job]:
        """What has come, once something of it is urgent or has waited; nothing when the thread is to end."""
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
        if isinstance(outcomes, ServiceError):  # what is only read, or is small enough, need not fail with the others
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
        """Runs them in one transaction. Why it failed, if it did: nothing of it is left then."""
        sizes = replace(self._bound.sizes)
        outcomes: list[tuple[_Job, Any]] = []
        try:
            if self._connection.in_transaction:  # an earlier one, which could not be rolled back then
                self._connection.execute("ROLLBACK")
            self._connection.execute("BEGIN")
            for job in jobs:
                try:
                    outcomes.append((job, job.run(self._connection)))
                except ServiceError as error:  # refused before anything was written
                    outcomes.append((job, error))
            if prune:
                self._bound.prune(self._connection)
            self._connection.execute("COMMIT")
        except Exception as error:  # whatever it is: without this thread every later caller waits for ever
            logger.exception("a transaction of %d journal jobs failed", len(jobs))
            try:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            except sqlite3.Error:
                logger.exception("it is rolled back before the next one")
            self._bound.sizes = sizes
            self._metrics.durability.journal_failures.inc()
            return self._in_words(error)
        return outcomes

    def _in_words(self, error: Exception) -> ServiceError:
        if journal_file.passes(error) or isinstance(error, MemoryError):
            return OutOfCapacity(f"the journal cannot be written: {str(error) or 'no memory is left'}")
        if isinstance(error, sqlite3.DataError | OverflowError | EncodeError):
            return Unstorable(f"the journal {self._path} cannot hold it: {error}")
        # These classes are about the file; the other subclasses of DatabaseError are about one statement.
        if type(error) in (sqlite3.DatabaseError, sqlite3.OperationalError, UnicodeDecodeError):
            return ServiceError(journal_file.damaged(self._path, error))
        return ServiceError(f"internal error at the journal {self._path}: {error!r}; the log has the cause")
