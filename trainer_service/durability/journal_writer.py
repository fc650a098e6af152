"""The thread that owns the journal's database.

Waiting writes share one transaction (group commit). In an outage of the database they wait, and their transaction is
tried again; it is unknown then whether the earlier attempt took place, so all jobs can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tinsmith.errors import NotReady, OutOfCapacity, ServiceError
from trainer_service.durability.journal_bound import Bound
from trainer_service.durability.journal_database import Database, Superseded
from trainer_service.durability.journal_pruning import Sizes
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARES_S = 0.02
"""Time that a job that is not urgent waits for an urgent one, to share its transaction, in seconds."""
_OUTAGE_PATIENCE_S = 10.0
"""Longest time for which jobs wait for the end of an outage, in seconds. Then they fail, and their callers may try
again."""
_OUTAGE_PAUSE_S = 0.25
"""Pause between two attempts in an outage, in seconds."""
_SAYS_FULL_S = 60.0
"""Least time between two lines of the log about a full disk, in seconds. Clients send a refused operation again and
again."""
_SUBMIT_AGAIN_S = 1.0
"""Pause before a job that must succeed is submitted again, in seconds."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[Database], Any]
    done: Future[Any]
    urgent: bool


class Writer:
    """Runs jobs from its creation until `close`, which waits for all submitted jobs and closes the database."""

    def __init__(self, database: Database, bound: Bound, metrics: Metrics) -> None:
        self.database = database
        self._bound = bound
        self._metrics = metrics
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._in_outage = False
        """True from an outage until the next successful transaction, which counts the journal's bytes again."""
        self._says_full_after = 0.0
        """When a full disk is to be logged again, on the monotonic clock."""
        self.superseded: Future[Superseded] = Future()
        """Has the reason once another trainer has taken over the journal. No later job runs."""
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._closing:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    async def submit(self, run: Callable[[Database], T], *, urgent: bool = True) -> T:
        """Calls `run` on the writer's thread. Returns its result once the transaction is on disk.

        `run` may be called several times. An earlier call's changes are then rolled back; after an outage they may also
        have been made. It may raise a ServiceError, which is raised here, but only before it writes. A job that is not
        urgent may take 20 ms longer; it mostly shares another job's write to the disk.

        Raises OutOfCapacity when the disk does not take the transaction, Unstorable when no disk would, NotReady after
        `close` and in a long outage, Superseded when the journal belongs to another trainer by now, and a plain
        ServiceError for a damaged journal and for any other error of `run`.
        """
        done: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise NotReady("the journal is closed: the trainer is going down")
            self._jobs.put(_Job(run, done, urgent))
        return await asyncio.wrap_future(done)

    async def submit_until_done(self, run: Callable[[Database], T], *, even_if_full: bool = False) -> T:
        """Submits `run` again and again, however long an outage lasts. `even_if_full`: also while the disk is full."""
        while True:
            try:
                return await self.submit(run)
            except Superseded:
                raise
            except (NotReady, OutOfCapacity) as error:
                if self._closed or (isinstance(error, OutOfCapacity) and not even_if_full):
                    raise
            await asyncio.sleep(_SUBMIT_AGAIN_S)

    def _work(self) -> None:
        """The writer's thread: runs all waiting jobs in one transaction, again and again."""
        while (jobs := self._take()) is not None:
            if jobs:
                self._commit(jobs)
            elif not self.superseded.done():
                self._note(self._attempt([]))
        self.database.close()

    def _take(self) -> list[_Job] | None:
        """Waits for jobs, and returns them once one is urgent or has waited for _SHARES_S. Returns no jobs after a
        pause in which an idle journal is to be renewed, and None when the thread is to end."""
        jobs: list[_Job] = []
        latest = 0.0
        while True:
            try:
                timeout = max(0.0, latest - time.monotonic()) if jobs else self.database.renew_s
                job = self._jobs.get(timeout=timeout)
            except queue.Empty:
                return jobs
            if job is None:
                if jobs:
                    self._jobs.put(None)
                return jobs or None
            if job.urgent:
                latest = 0.0
            elif not jobs:
                latest = time.monotonic() + _SHARES_S
            jobs.append(job)

    def _commit(self, jobs: list[_Job]) -> None:
        started = time.perf_counter()
        outcomes = self._patient_attempt(jobs)
        if isinstance(outcomes, NotReady):  # every job fails: none reached the database
            outcomes = [(job, outcomes) for job in jobs]
        elif isinstance(outcomes, ServiceError):  # jobs that only read, or are small enough, may succeed alone
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

    def _patient_attempt(self, jobs: list[_Job]) -> list[tuple[_Job, Any]] | ServiceError:
        """`_attempt` with pruning, again and again in an outage, for at most _OUTAGE_PATIENCE_S."""
        if self.superseded.done():
            return self.superseded.result()
        until = time.monotonic() + _OUTAGE_PATIENCE_S
        while True:
            outcomes = self._attempt(jobs, prune=True)
            self._note(outcomes)
            if not self._in_outage or self.superseded.done() or self._closed or time.monotonic() > until:
                return outcomes
            time.sleep(_OUTAGE_PAUSE_S)

    def _note(self, outcomes: list[tuple[_Job, Any]] | ServiceError) -> None:
        if isinstance(outcomes, Superseded) and not self.superseded.done():
            self.superseded.set_result(outcomes)

    def _alone(self, job: _Job) -> tuple[_Job, Any]:
        outcomes = self._attempt([job])
        return (job, outcomes) if isinstance(outcomes, ServiceError) else outcomes[0]

    def _attempt(self, jobs: list[_Job], *, prune: bool = False) -> list[tuple[_Job, Any]] | ServiceError:
        """Runs jobs in one transaction. Returns their outcomes, or the error after which it was rolled back."""
        sizes = replace(self._bound.sizes)
        outcomes: list[tuple[_Job, Any]] = []
        try:
            self.database.begin()
            if self._in_outage:
                self._bound.sizes = Sizes.of(self.database)
            for job in jobs:
                try:
                    outcomes.append((job, job.run(self.database)))
                except ServiceError as error:  # the job refused before it wrote anything
                    outcomes.append((job, error))
            if prune:
                self._bound.prune(self.database)
            self.database.commit()
        except Exception as error:  # no error may end this thread: every later caller would wait for ever
            self._bound.sizes = sizes
            self._roll_back(error, num_jobs=len(jobs))
            return error if isinstance(error, Superseded) else self.database.in_words(error)
        if self._in_outage:
            self._in_outage = False
            logger.info("the journal %s is there again", self.database.name)
        return outcomes

    def _roll_back(self, error: Exception, *, num_jobs: int) -> None:
        if isinstance(error, Superseded):
            return
        if self.database.is_outage(error):
            if not self._in_outage:
                self._in_outage = True
                logger.error("the journal %s cannot be reached, and is tried again: %s", self.database.name, error)
        elif isinstance(cause := self.database.in_words(error), OutOfCapacity):
            if time.monotonic() > self._says_full_after:
                self._says_full_after = time.monotonic() + _SAYS_FULL_S
                logger.error("%s", cause)
        else:
            logger.exception("a transaction of %d journal jobs failed", num_jobs)
        try:
            self.database.rollback()
        except Exception:
            logger.exception("the transaction cannot be rolled back now; this is tried again before the next one")
        self._metrics.durability.journal_failures.inc()
