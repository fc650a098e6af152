"""The compute thread: runs one micro-batch or one call after the other, while there is something to do.

The event loop puts in work and gets the results; packing.py chooses the next work. Between two works the thread does
not wait for the event loop, which converts, stores and logs results while the thread goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinsmith.cores import Cores, yield_to_event_loops
from tinsmith.errors import EngineDead, ServiceError, storable
from tinsmith.rpc import tracing
from tinsmith.tasks import set_within
from trainer_service.durability.executing import Executing, Name
from trainer_service.engine.batch import Batch, MicroBatch, Output
from trainer_service.metrics import Metrics
from trainer_service.operation import Call, Operation
from trainer_service.scheduling.packing import Lanes, Selection
from trainer_service.scheduling.speed import Speed

logger = logging.getLogger(__name__)

_LONE_AFTER_S = 30.0
"""A model has the trainer for itself when no other model's operation has come for this long, in seconds."""
_LONG_MICRO_BATCH_S = 2.0
"""Time that a micro-batch should take while one model has the trainer for itself, or models are moved between device
and host, in seconds."""
T = TypeVar("T")


class BatchEngine(Protocol):
    """The part of the engine that the scheduler calls: its Passes. Operations other than batches bring their own calls.

    For each batch `charge` is called once, on the event loop. All other methods are called on the compute thread: `run`
    with every datum of a batch once, in micro-batches of any size, then `finish` once. After a failure the remaining
    datums are not run.
    """

    def charge(self, batch: Batch) -> None:
        """Sets the charges of the batch's datums if they depend on its model. Sets the batch's error if a datum can
        never fit."""
        ...

    @property
    def token_budget(self) -> int:
        """Most tokens of a micro-batch at present. A longer datum is a micro-batch by itself."""
        ...

    def go_together(self, model_ids: Sequence[str]) -> bool:
        """Whether a micro-batch may have datums of all these models."""
        ...

    @property
    def moves_models(self) -> bool:
        """Whether models that do not fit on the device wait in host memory."""
        ...

    def run(self, micro_batch: MicroBatch) -> None:
        """Computes one micro-batch of any models' batches, either all forward_only or none. A batch that fails gets its
        `error`."""
        ...

    def finish(self, batch: Batch) -> Output | ServiceError:
        """The result, or the batch's error. After an error the model's next optim_step fails, because gradients are
        missing."""
        ...

    def is_dead(self, error: Exception) -> bool:
        """True for an error after which nothing can be computed in this process, whichever operation met it."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """The work that the thread does now."""

    operations: Sequence[Operation]
    num_tokens: int
    """Charged tokens of a micro-batch; 0 for a call."""
    started_s: float
    """Time of its start, by time.perf_counter."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of the thread, and the size of its micro-batches."""

    num_threads: int
    """CPU threads of the newest work; 0 means torch's default."""
    micro_batch_tokens: int
    """Most tokens of the next micro-batch."""
    tokens_per_s: float
    """Measured speed of large micro-batches; 0 before the first."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work to be done, at one moment."""

    running: Running | None
    operations: Mapping[str, Sequence[Operation]]
    """For each model its operations on the compute thread that have not ended, in order."""

    def waiting(self, model_id: str) -> Iterator[tuple[Operation, int]]:
        """A model's waiting operations in order, each with the number of its waiting tokens; 0 for a call."""
        for operation in self.operations.get(model_id, ()):
            if operation.is_waiting:
                yield operation, operation.num_waiting_tokens


class ComputeThread:
    """Owns the compute thread. All public methods run on the event loop on which it was made."""

    def __init__(
        self,
        engine: BatchEngine,
        metrics: Metrics,
        executing: Executing,
        cores: Cores,
        *,
        device_type: str = "cpu",
        alone: bool = False,
    ) -> None:
        self._engine = engine
        self._cores = cores
        self._executing = executing
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._lanes = Lanes(alone=alone)
        self._alone = alone
        self._stopped: list[Operation] = []  # operations whose batches have begun and must end early
        self._running: Running | None = None
        self._closed = False
        self._changed = threading.Condition()  # guards everything above
        self._results: list[tuple[asyncio.Future[Any], object]] = []  # not delivered to the event loop yet
        self._ended = asyncio.Event()
        self.engine_died = asyncio.Event()
        """Set when nothing can be computed any more. Running and waiting operations get no result, because the fault is
        not theirs."""
        self.speed = Speed(device_type)
        self._newest_model = ""
        """The model whose operation came last; empty before the first one."""
        self._shared_at: float | None = None
        """Time at which an operation of another model than the one before came last, by time.monotonic."""
        metrics.operations.queue_oldest.set_function(self._oldest_s)
        metrics.compute.running.set_function(self._running_s)
        threading.Thread(target=self._work, name="compute", daemon=True).start()

    def put(self, operation: Operation) -> None:
        """Adds an operation behind its model's other ones. Its result is set later; after `close` it is cancelled."""
        assert operation.result is not None
        with self._changed:
            if self._closed:
                operation.result.cancel()
                return
            if self._newest_model not in ("", operation.model_id):
                self._shared_at = time.monotonic()
            self._newest_model = operation.model_id
            with self.dying_of_errors():
                self._lanes.put(operation)
            self._changed.notify()

    def charge(self, batch: Batch) -> None:
        """Sets the charges and costs of the batch's datums. Called before `put`."""
        self._engine.charge(batch)
        if (speed := self.loss_speed) is not None:
            more = [speed.loss_tokens(datum.loss_s) if datum.loss_s else 0 for datum in batch.datums]
            batch.set_costs([charge + tokens for charge, tokens in zip(batch.charges, more, strict=True)])

    def withdraw(self, model_id: str, error: ServiceError) -> None:
        """Fails a model's waiting operations with `error`. A batch that has begun is stopped after the current
        micro-batch, and a running call ends as usual."""
        with self._changed, self.dying_of_errors():
            for operation in self._lanes.withdraw(model_id):
                if operation.batch is not None and operation.has_begun:
                    operation.stopped_by = error
                    self._stopped.append(operation)  # the engine has begun the batch, and must finish it
                elif operation.result is not None:
                    operation.result.set_exception(error)
            self._changed.notify()

    def withhold(self, model_id: str, error: ServiceError) -> None:
        """Fails a model's operations that have not begun with `error`. Those that have begun go on to their end."""
        with self._changed, self.dying_of_errors():
            for operation in self._lanes.withhold(model_id):
                if operation.result is not None and not operation.result.done():
                    operation.result.set_exception(error)
            self._changed.notify()

    async def run_alone(
        self, call: Callable[[], T], *, canary_tokens: int | None = None, name: Name | None = None
    ) -> T:
        """Runs a call that belongs to no operation, after the current work. For the other arguments see Call."""
        result: asyncio.Future[T] = self._loop.create_future()
        with self._changed:
            if self._closed:
                result.cancel()
            else:
                self._lanes.put_first(Call(None, call, result, canary_tokens, name))
            self._changed.notify()
        return await result

    async def close(self, *, timeout_s: float) -> bool:
        """Stops the thread after its current work. Returns False when that still runs after `timeout_s` seconds."""
        with self._changed:
            self._closed = True
            for withdrawn in self._lanes.withdraw_all():
                if withdrawn.result is not None:
                    withdrawn.result.cancel()
            self._changed.notify()
        return await set_within(self._ended, timeout_s)

    @contextmanager
    def dying_of_errors(self) -> Iterator[None]:
        """A context that sets `engine_died` when its block raises, and drops the error. The block changes the records
        of waiting operations. After an error there, some operations would wait for ever, or fail without a fault of
        their own."""
        try:
            yield
        except Exception:
            logger.critical(
                "the records of waiting operations are wrong: the trainer ends, and they run again after a restart",
                exc_info=True,
            )
            self.engine_died.set()

    def ends_with(self, error: Exception, name: Name) -> bool:
        """True for an error, met outside the thread, after which nothing can be computed. Then `engine_died` is set,
        and the end of the process counts as a death in the work `name`, which met the error."""
        if not self._engine.is_dead(error):
            return False
        logger.critical(
            "the engine has died in %s, %d, and the trainer ends; its operations run again after a restart",
            *name,
            exc_info=error,
        )
        self._executing.blame(name)
        self.engine_died.set()
        return True

    def backlog(self) -> Backlog:
        with self._changed:
            return Backlog(self._running, self._lanes.waiting())

    @property
    def running(self) -> Running | None:
        """The work that the thread does now."""
        return self._running

    def pace(self) -> Pace:
        return Pace(self._cores.threads, self._micro_batch_tokens(), self.speed.large_tokens_per_s)

    @property
    def is_busy(self) -> bool:
        """Whether the thread computes now."""
        return self._running is not None

    @property
    def loss_speed(self) -> Speed | None:
        """Measured speed, which converts the time of custom losses into tokens. None for a deterministic trainer, whose
        micro-batches must not depend on measurements."""
        return None if self._alone else self.speed

    # Called by the thread that serves the metrics

    def _oldest_s(self) -> float:
        with self._changed:
            following = self._lanes.next_of_each()
        return time.perf_counter() - min(one.arrived_s for one in following) if following else 0.0

    def _running_s(self) -> float:
        running = self._running
        return 0.0 if running is None else time.perf_counter() - running.started_s

    # On the thread

    def _work(self) -> None:
        """The thread's loop. An operation's own error becomes its result. Any other error sets `engine_died`: otherwise
        operations would wait for ever, or fail without a fault of their own."""
        try:
            yield_to_event_loops()
            while (work := self._next()) is not None:
                assert self._running is not None
                if isinstance(work, Call):
                    self._cores.begin(num_tokens=work.canary_tokens, is_shared=work.canary_tokens is not None)
                else:
                    self._cores.begin(num_tokens=self._running.num_tokens)
                self._metrics.compute.threads.set(self._cores.threads)
                names = [(operation.model_id, operation.seq_id) for operation in self._running.operations]
                if isinstance(work, Call) and work.name is not None:
                    names.append(work.name)
                self._executing.begin(names)
                if isinstance(work, Call):
                    self._run_call(work)
                else:
                    self._run_micro_batch(work)
                self._executing.end(names)  # not after an exception: the process ends then, and the operations count
        except BaseException:
            logger.critical(
                "the compute thread has died, and the trainer ends; its operations run again after a restart",
                exc_info=True,
            )
            self._loop.call_soon_threadsafe(self.engine_died.set)
        self._loop.call_soon_threadsafe(self._ended.set)

    def _next(self) -> Call | Selection | None:
        """Waits for the next work; None when the thread is to end.

        The results of the last work are delivered only when the next is known, because the event loop takes the
        interpreter's lock to handle them.
        """
        while True:
            self._end_stopped()
            with self._changed:
                self._running = None
                started = time.perf_counter()
                work = None if self._closed else self._lanes.next(self._micro_batch_tokens(), self._engine.go_together)
                if work is not None:
                    self._metrics.compute.phases["schedule"].observe(time.perf_counter() - started)
                    self._running = self._begin(work)
                if work is not None or self._closed:
                    break
                if not self._results and not self._stopped:
                    self._cores.end()
                    self._changed.wait()
                    self._metrics.compute.idle_seconds.inc(time.perf_counter() - started)
            self._deliver()
        self._deliver()
        return work

    def _micro_batch_tokens(self) -> int:
        """Most tokens of the next micro-batch: as many as are computed in the time that it should take, at the measured
        speed, and at most the engine's token budget. For a deterministic trainer, the budget alone.

        While models take turns on the device, a short micro-batch would spend a large part of its time on moves
        (`python -m benchmarks tenants`)."""
        budget = self._engine.token_budget
        if self._alone:
            return budget
        is_lone = self._shared_at is None or time.monotonic() - self._shared_at > _LONE_AFTER_S
        is_long = is_lone or (self._lanes.is_crowded and self._engine.moves_models)
        return min(budget, self.speed.tokens_of(_LONG_MICRO_BATCH_S) if is_long else self.speed.short_tokens)

    def _deliver(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self._loop.call_soon_threadsafe(_resolve, results)

    def _begin(self, work: Call | Selection) -> Running:
        now = time.perf_counter()
        if isinstance(work, Call):
            operations = [work.operation] if work.operation is not None else []
            num_tokens = 0
        else:
            operations = [operation for operation, _ in work]
            num_tokens = sum(_batch(operation).charge(indices) for operation, indices in work)
        for operation in operations:
            if not operation.has_begun:
                operation.has_begun = True
                tracing.record("queue", operation.trace, start=operation.arrived_at, end=time.time())
                self._metrics.operations.queue_length.labels(operation.kind).dec()
                self._metrics.operations.queue_seconds.labels(operation.kind).observe(now - operation.arrived_s)
        return Running(operations, num_tokens, now)

    def _run_call(self, call: Call) -> None:
        started_at = time.time()
        try:
            result = call.run()
        except Exception as error:
            self._check_alive(error)
            result = error
        self._results.append((call.result, result))
        if call.operation is not None:
            call.operation.ran = started_at, time.time()
            tracing.record(call.operation.kind, call.operation.trace, start=started_at, end=call.operation.ran[1])
            with self._changed:
                self._lanes.end(call.operation)
            self._measure(call.operation.kind)

    def _run_micro_batch(self, work: Selection) -> None:
        started_at = time.time()
        batches = [(_batch(operation), indices) for operation, indices in work]
        try:
            self._engine.run(batches)
        except Exception as error:
            self._check_alive(error)
            logger.exception("forward_backward of %s failed", ", ".join(batch.model_id for batch, _ in batches))
            for batch, _ in batches:
                batch.error = error if isinstance(error, ServiceError) else internal_error()
        ended_at = time.time()
        for operation, indices in work:
            operation.ran = operation.ran[0] if operation.ran else started_at, ended_at
            if (trace := operation.trace) is not None:
                tokens = _batch(operation).charge(indices)
                facts = {"tokens": tokens, "datums": len(indices), "other_operations": len(work) - 1}
                tracing.record("micro_batch", trace, start=started_at, end=ended_at, **facts)
        self._end([operation for operation, _ in work if operation.has_ended])
        with self._changed:
            self._lanes.end_micro_batch()
        self._metrics.compute.micro_batches.inc()
        self._metrics.compute.micro_batch_models.observe(len({batch.model_id for batch, _ in batches}))
        expected_s = sum(batch.datums[index].loss_s for batch, indices in batches for index in indices)
        loss_seconds = sum(batch.loss_seconds for batch, _ in batches)
        self._measure("forward_backward", loss_seconds=loss_seconds, expected_loss_seconds=expected_s)
        with self._changed:
            for batch, indices in batches:
                charged = sum(batch.costs[index] - batch.charges[index] for index in indices)
                self._lanes.charge(batch.model_id, max(0, self.speed.tokens_in(batch.loss_seconds) - charged))
                batch.loss_seconds = 0.0

    def _end_stopped(self) -> None:
        with self._changed:
            stopped, self._stopped = self._stopped, []
        self._end([operation for operation in stopped if not operation.is_computed])

    def _end(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            assert operation.result is not None
            self._results.append((operation.result, self._output(operation)))
        with self._changed:
            for operation in operations:
                self._lanes.end(operation)

    def _output(self, operation: Operation) -> Output | ServiceError:
        batch = _batch(operation)
        batch.error = batch.error or operation.stopped_by
        try:
            return self._engine.finish(batch)
        except Exception as error:
            self._check_alive(error)
            logger.exception("the result of %s, seq_id %d, is lost", operation.model_id, operation.seq_id)
            return internal_error()

    def _check_alive(self, error: Exception) -> None:
        """Raises EngineDead for an error after which every further work would fail, too."""
        if self._engine.is_dead(error):
            raise EngineDead(f"the engine has died: {error}") from error

    def _measure(self, kind: str, *, loss_seconds: float = 0.0, expected_loss_seconds: float = 0.0) -> None:
        """Records the time of the work that has just run. `loss_seconds`: the part that custom losses took.
        `expected_loss_seconds`: the part that they were expected to take."""
        running = self._running
        assert running is not None
        seconds = time.perf_counter() - running.started_s
        self.speed.observe(
            seconds,
            num_tokens=running.num_tokens,
            loss_seconds=loss_seconds,
            expected_loss_seconds=expected_loss_seconds,
        )
        self._metrics.compute.tokens_per_second.set(self.speed.large_tokens_per_s)
        self._metrics.compute.step_seconds.labels(kind).observe(seconds)
        if running.num_tokens:
            self._metrics.compute.tokens.inc(running.num_tokens)
            self._metrics.compute.micro_batch_tokens.observe(running.num_tokens)


def _batch(operation: Operation) -> Batch:
    assert operation.batch is not None
    return operation.batch


def _resolve(results: Sequence[tuple[asyncio.Future[Any], object]]) -> None:
    for future, result in results:
        if future.done():  # the call was cancelled meanwhile
            continue
        if isinstance(result, StopIteration):
            future.set_exception(storable(result))
        elif isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def internal_error() -> ServiceError:
    return ServiceError("internal error; the trainer's log has the cause")
