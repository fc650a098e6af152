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
from typing import Any, TypeVar

from tinsmith.rpc.errors import OutOfCapacity, ServiceError
from trainer_service.durability.journal_bound import Bound
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    done: Future[Any]


class Writer:
    """Runs from its making until `close`, which waits for what was submitted before and closes the connection."""

    def __init__(self, connection: sqlite3.Connection, bound: Bound, metrics: Metrics) -> None:
        self._connection = connection
        self._bound = bound
        self._metrics = metrics
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def submit(self, run: Callable[[sqlite3.Connection], T]) -> T:
        """What `run` gives, once its transaction is on disk. It may run twice: the first time is rolled back then.

        A ServiceError of `run` is raised here, and must come before it writes. Raises OutOfCapacity when the disk
        does not take the transaction.
        """
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
        outcomes = self._attempt(jobs, prune=True)
        if outcomes is None:  # what is only read, or is small enough, need not fail with the others
            outcomes = [outcome for job in jobs for outcome in self._attempt([job]) or [(job, self._failure)]]
        self._metrics.journal_commit_seconds.observe(time.perf_counter() - started)
        self._metrics.journal_bytes.set(self._bound.sizes.total)
        for job, outcome in outcomes:
            if not job.done.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, ServiceError):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)

    def _attempt(self, jobs: list[_Job], *, prune: bool = False) -> list[tuple[_Job, Any]] | None:
        """Runs them in one transaction. None when it failed, and nothing of it is left."""
        sizes = replace(self._bound.sizes)
        outcomes: list[tuple[_Job, Any]] = []
        try:
            self._connection.execute("BEGIN")
            for job in jobs:
                try:
                    outcomes.append((job, job.run(self._connection)))
                except ServiceError as error:  # refused before anything was written
                    outcomes.append((job, error))
            if prune:
                self._bound.prune(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            logger.exception("a transaction of %d journal jobs failed", len(jobs))
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._bound.sizes = sizes
            self._metrics.journal_failures.inc()
            self._failure = OutOfCapacity(f"the journal cannot be written: {error}")
            return None
        return outcomes
