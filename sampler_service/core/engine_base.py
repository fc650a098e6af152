"""The event loop's half of both engines: checks requests, holds versions for them, and ends each of them once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from sampler_service import large
from sampler_service.config import SamplerConfig
from sampler_service.core.request import Generation, Request, Result
from sampler_service.core.sampling import stream_keys
from sampler_service.core.scoring import PromptScorer
from sampler_service.core.sequence import Sequence
from sampler_service.core.stops import StopRules
from sampler_service.core.task import Task
from sampler_service.core.validation import Limits
from sampler_service.core.versions import FollowedRuns, Version, VersionInfo, VersionStore
from sampler_service.grammars import Grammars
from sampler_service.metrics import SamplerMetrics
from tinsmith.errors import EngineDead, NotReady, OutOfCapacity, ServiceError
from tinsmith.rpc.paths import is_newer

logger = logging.getLogger(__name__)

SAMPLE_STREAM = 0


class EngineBase(ABC):
    """The half of a SamplingEngine that does not compute."""

    def __init__(self, config: SamplerConfig, metrics: SamplerMetrics, limits: Limits, stops: StopRules) -> None:
        self.metrics = metrics
        self.limits = limits
        self.died = asyncio.Event()
        """Set when the engine cannot go on."""
        self._config = config
        self._stops = stops
        self._grammars = Grammars(stops.path, vocab_size=limits.vocab_size, eos_token_ids=sorted(stops.eos_token_ids))
        self._store = VersionStore(max_bytes=config.adapter_memory_bytes, on_gone=self._forget)
        self._followed_runs = FollowedRuns(self._store.__contains__)
        self._tasks: dict[Task, None] = {}
        """Requests that have not ended, in the order of their arrival."""
        self._num_waiting = 0
        self._held_bytes = 0
        """Memory of the requests that have not ended, in bytes."""
        self._stopping = False
        self._orders = itertools.count()
        self._dying: asyncio.Task[None] | None = None
        self.on_death: Callable[[], Awaitable[None]] | None = None
        """Awaited before requests hear that the engine has died: the service's health says so first."""
        metrics.requests.queue_limit.set(config.max_waiting)
        metrics.versions.limit_bytes.set(config.adapter_memory_bytes)
        metrics.requests.queue_oldest.set_function(self._oldest_s)

    @property
    def max_context_length(self) -> int:
        return self.limits.max_length

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    def confirm(self, version_id: str) -> None:
        self._store.confirm(version_id)
        self._count_versions()

    def remove(self, version_id: str) -> None:
        self._store.remove(version_id)
        self._count_versions()

    def versions(self) -> list[VersionInfo]:
        return self._store.versions()

    @abstractmethod
    def _cancel(self, task: Task) -> None:
        """Ends a request whose caller has left."""

    @abstractmethod
    def _forget(self, version: Version) -> None:
        """Drops a version that is neither visible nor in use any more."""

    @abstractmethod
    def _let_go(self, task: Task) -> None:
        """Releases what an ended request still holds."""

    async def _accept(self, request: Request, *, stream: bool, request_id: str) -> Task:
        """Checks a request, and counts it as waiting. Raises what submit does."""
        check = partial(self.limits.check, request)
        await large.run(check) if request.targets is not None else check()
        stop = await self._stops.rule(request.params.stop)
        grammar = None
        if request.grammar is not None:
            grammar = await self._grammars.compiled(request.grammar)
            stop = replace(stop, token_ids=stop.token_ids | grammar.eos_token_ids)  # they end the text
        self._check_alive()
        if self._num_waiting >= self._config.max_waiting and not request.on_probation:
            raise OutOfCapacity(f"{self._num_waiting} requests wait already, the most that max_waiting allows")
        num_bytes, most = request.num_bytes, self._config.max_held_bytes
        if self._held_bytes + num_bytes > most and self._tasks and not request.on_probation:
            raise OutOfCapacity(
                f"requests hold {self._held_bytes} bytes, this one takes {num_bytes}, and max_held_bytes is {most}"
            )
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        scorer = PromptScorer(request, seed=seed) if request.wants_scores else None
        version_id = self._followed_runs.first_version(request)
        version = self._store.acquire(version_id, on_probation=request.on_probation) if version_id else None
        task = Task(
            request=request,
            generation=Generation(stream=stream, on_cancel=lambda: self._cancel(task)),
            version=version,
            stop=stop,
            keys=stream_keys(seed, SAMPLE_STREAM, request.num_samples),
            scorer=scorer,
            grammar=grammar,
            request_id=request_id,
        )
        length, max_tokens, order = len(request.prompt), request.params.max_tokens, next(self._orders)
        task.sequences = [
            Sequence(
                owner=task,
                index=index,
                prompt_length=length,
                max_length=self.limits.max_length if max_tokens is None else length + max_tokens,
                bounded=max_tokens is not None,
                order=order,
            )
            for index in range(request.num_samples)
        ]
        self._tasks[task] = None
        self._held_bytes += num_bytes
        self._count_waiting(1)
        return task

    @contextmanager
    def _lost_without(self, task: Task) -> Iterator[None]:
        """Ends the accepted request when the block raises. Otherwise its caller would wait for ever."""
        try:
            yield
        except Exception as error:
            task.fail(error)
            assert task.failure is not None
            self._end(task, task.failure)
            raise task.failure from error

    @contextmanager
    def _dying_of_errors(self) -> Iterator[None]:
        """Lets the engine die when the block raises. An error in the books on requests would leave some waiting for
        ever."""
        try:
            yield
        except Exception as error:
            logger.critical("the event loop's half of the engine has failed", exc_info=True)
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Takes no request any more, then tells the service, then ends the requests. Does so once."""
        if not self.died.is_set():
            self.died.set()
            self._dying = asyncio.get_running_loop().create_task(self._end_dead(error))

    async def _end_dead(self, error: BaseException) -> None:
        try:
            if self.on_death is not None:
                await self.on_death()
        finally:
            for task in list(self._tasks):
                computing = "yes" if task.planned or task.admitted else "no"
                self._end(task, EngineDead(f"the engine has died: {error}", computing=computing))
            self._end_all(EngineDead(f"the engine has died: {error}"))

    def _behind(self, run_id: str, version_id: str) -> list[Task]:
        """Requests that are to move to a version, which they hold now. Raises what move does."""
        self._check_alive()
        self._store.check(version_id)
        if not self._followed_runs.move(run_id, version_id):
            return []
        behind = [
            task
            for task in self._tasks
            if task.request.follow_run == run_id
            and is_newer(version_id, task.held[-1].version_id if task.held else "", run_id=run_id)
        ]
        for task in behind:
            task.held.append(self._store.acquire(version_id))
        return behind

    def _check_alive(self) -> None:
        if self.died.is_set():
            raise EngineDead("the engine has died; the log has the cause", computing="no")
        if self._stopping:
            raise NotReady("the sampler is shutting down")

    def _admitted(self, task: Task) -> None:
        if task in self._tasks and not task.admitted:
            task.admitted = True
            self._count_waiting(-1)

    def _end(self, task: Task, outcome: Result | ServiceError) -> None:
        """The one end of a request; a cancel may cross with a result."""
        if task not in self._tasks:
            return
        self._admitted(task)
        del self._tasks[task]
        self._held_bytes -= task.request.num_bytes
        self.metrics.requests.ended.labels(outcome.reason if isinstance(outcome, ServiceError) else "ok").inc()
        try:
            self._let_go(task)
            task.forget_versions()
        finally:
            task.generation.finish(outcome)

    def _end_all(self, error: ServiceError) -> None:
        for task in list(self._tasks):
            self._end(task, error)

    def _count_waiting(self, change: int) -> None:
        self._num_waiting += change
        self.metrics.requests.waiting.set(self._num_waiting)

    def _oldest_s(self) -> float:
        """Seconds that the oldest waiting request has waited. The thread that serves the metrics calls this."""
        waiting = [task.submitted for task in list(self._tasks) if not task.admitted]
        return time.perf_counter() - min(waiting) if waiting else 0.0

    def _count_versions(self) -> None:
        self.metrics.versions.resident.set(len(self._store.versions()))
        self.metrics.versions.resident_bytes.set(self._store.num_bytes)
