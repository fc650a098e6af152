"""The order of training operations. Three promises, for each model:

1. Order: operations are executed by seq_id, without gaps, whatever order they arrive in. One that comes early waits; a
   seq_id that never comes is no error. A failed operation, also one that validation refused, uses up its seq_id.
2. Once: the same (model_id, seq_id) again is the same operation, running or finished; with another body it is refused.
3. One at a time: the engine sees one call at a time, on one compute thread.

An operation is accepted when it is in the journal. From then on it lives here, whatever becomes of the call that
brought it.

A batch goes to the compute thread as it is (compute.py), when its model comes to it. Every other operation is a
coroutine that takes its turn on the compute thread, at most once, with `Turn.run`. What it awaits before delays its own
model only. What it awaits after delays only its own result: the model goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.rpc import logs
from tinsmith.rpc.errors import ModelNotFound, OutOfCapacity, ResultNotFound, SequenceConflict, ServiceError
from tinsmith.v1.types_pb2 import QueueStatus
from trainer_service.compute import ComputeThread, internal_error
from trainer_service.journal import Body, Journal
from trainer_service.metrics import Metrics
from trainer_service.model_queue import Call, ModelQueue
from trainer_service.queue_status import FINISHED, status_of
from trainer_service.work import Answer, BatchEngine, Operation, RunBatch, Turn, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Turn:
    """The Turn that an operation is given."""

    _scheduler: Scheduler
    _model: ModelQueue
    _operation: Operation

    async def run(self, call: Callable[[], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._scheduler._enqueue(self._model, Call(self._operation, call, result))
        return await result

    async def settled(self) -> None:
        if earlier := [operation.outcome for operation in self._model.unsettled - {self._operation}]:
            await asyncio.wait(earlier)


class Scheduler:
    """See the module's docstring. All methods run on one event loop."""

    def __init__(
        self,
        engine: BatchEngine,
        journal: Journal,
        *,
        max_tokens_per_call: int,
        max_queued_operations: int,
        max_models: int,
        metrics: Metrics,
    ) -> None:
        self._journal = journal
        self._max_queued_operations = max_queued_operations
        self._max_models = max_models
        self._metrics = metrics
        self._models: dict[str, ModelQueue] = {}
        self._compute = ComputeThread(self, engine, max_tokens_per_call=max_tokens_per_call, metrics=metrics)
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def accept(self, model_id: str, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]]) -> Operation:
        """Returns once the operation is in the journal; a repeat returns the first one. Operation 0 makes the model.

        `build` makes the work while the journal writes; what it refuses must be a work that fails. Raises
        ModelNotFound, ModelLost, SequenceConflict, ResultNotFound (a repeat whose result has expired), OutOfCapacity.
        """
        return await asyncio.shield(self.spawn(self._accept(model_id, seq_id, body, build)))

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired."""
        model = self._models.get(model_id)
        if model is not None and seq_id in model.operations:
            return await _accepted(model.operations[seq_id])
        operation = await self._stored(model_id, seq_id)
        if operation is None:
            raise ResultNotFound(f"{model_id}: no operation with seq_id {seq_id} was accepted")
        return operation

    async def describe(self, model_id: str, seq_id: int) -> QueueStatus:
        """What an accepted operation waits for. Raises ResultNotFound when there is none, or its result has expired."""
        operation = await self.find(model_id, seq_id)
        model = self._models.get(model_id)
        if model is not None and model.operations.get(seq_id) is operation:
            compute = self._compute
            return status_of(operation, model, ready=compute.ready, running=compute.running, speed=compute.speed)
        if isinstance(outcome := operation.outcome.result(), ResultNotFound):
            raise outcome
        return FINISHED

    def next_seq_id(self, model_id: str) -> int:
        return self._models[model_id].next_seq_id

    async def delete(self, model_id: str, call: Callable[[], object]) -> None:
        """Forgets a model: what is queued fails, what runs is waited for, then `call` runs on the compute thread."""
        model = self._models.pop(model_id, None)
        if model is not None:
            self._metrics.models.set(len(self._models))
            running = [operation.outcome for operation in model.unsettled]
            self._abandon(model, ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id))
            if running:
                await asyncio.wait(running)
            await self._compute.run_alone(call)
        await self._journal.delete_model(model_id)

    async def close(self, *, timeout_s: float) -> bool:
        """Starts nothing more and waits for what runs. What is queued stays accepted in the journal.

        Returns False when something still ran after `timeout_s` seconds.
        """
        self._closed = True
        self._compute.stop()
        deadline = time.monotonic() + timeout_s
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - time.monotonic())
        self._compute.shutdown()
        for task in self._tasks:
            task.cancel()
        return not self._tasks

    async def _accept(self, model_id: str, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]]) -> Operation:
        model = self._models.get(model_id)
        if model is not None and seq_id in model.operations:
            return await _accepted(_same(model.operations[seq_id], body))
        if model is None or seq_id < model.next_seq_id:
            stored = await self._stored(model_id, seq_id)
            if stored is not None:
                return _same(stored, body)
            if model is not None:
                raise ResultNotFound(f"{model_id}: seq_id {seq_id} was executed long ago; its result has expired")
            await self._journal.check_not_lost(model_id)
            if seq_id != 0:
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            if model_id in self._models:  # a repeat came meanwhile
                return await self._accept(model_id, seq_id, body, build)
            model = self._new_model(model_id)
        if model.gone is not None:
            raise model.gone
        # One that closes a gap is always taken, or what waits behind the gap would wait for ever.
        if seq_id > max(model.operations, default=0) and len(model.queued) >= self._max_queued_operations:
            raise OutOfCapacity(
                f"{model_id}: {len(model.queued)} operations are queued, this server's max_queued_operations"
            )
        return await self._append(model, seq_id, body, build)

    def _new_model(self, model_id: str) -> ModelQueue:
        if len(self._models) >= self._max_models:
            raise OutOfCapacity(
                f"{len(self._models)} models are live, this server's max_models; close a session that is done"
            )
        model = self._models[model_id] = ModelQueue(model_id)
        self._metrics.models.set(len(self._models))
        return model

    async def _append(
        self, model: ModelQueue, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]]
    ) -> Operation:
        loop = asyncio.get_running_loop()
        operation = Operation(
            model.model_id, seq_id, body.kind, body.digest, accepted=loop.create_future(), outcome=loop.create_future()
        )
        model.operations[seq_id] = operation
        try:
            work, _ = await asyncio.gather(build(), self._journal.append(model.model_id, seq_id, body))
        except Exception as error:
            model.operations.pop(seq_id, None)
            if seq_id == 0:
                self._models.pop(model.model_id, None)
            operation.accepted.set_result(
                error if isinstance(error, ServiceError) else ServiceError("internal error; the log has the cause")
            )
            raise
        operation.accepted.set_result(None)
        if not operation.outcome.done():  # the model may have been deleted meanwhile
            self._metrics.queue_length.labels(operation.kind).inc()
            operation.work = work
            self._advance(model)
        return operation

    async def _stored(self, model_id: str, seq_id: int) -> Operation | None:
        """A finished operation, from the journal."""
        record = await self._journal.find(model_id, seq_id)
        if record is None:
            return None
        loop = asyncio.get_running_loop()
        operation = Operation(
            model_id, seq_id, record.kind, record.digest, accepted=loop.create_future(), outcome=loop.create_future()
        )
        operation.accepted.set_result(None)
        operation.outcome.set_result(
            record.outcome or ResultNotFound(f"{model_id}: the result of seq_id {seq_id} has expired")
        )
        return operation

    def _advance(self, model: ModelQueue) -> None:
        """Starts the model's next operation, if it is here and the one before has had its turn."""
        operation = model.operations.get(model.next_seq_id)
        if model.gone or model.head is not None or operation is None or operation.work is None or self._closed:
            return
        if any(earlier.seq_id == 0 for earlier in model.unsettled):  # the model does not exist yet
            return
        model.head = operation
        model.unsettled.add(operation)
        if isinstance(operation.work, RunBatch):
            self._compute.put(model, operation)
        else:
            self.spawn(self._run_work(model, operation, operation.work))

    def _enqueue(self, model: ModelQueue, call: Call) -> None:
        if model.gone is not None:
            call.result.set_exception(model.gone)
        elif self._closed:
            call.result.cancel()
        else:
            self._compute.put(model, call)

    def taken(self, model: ModelQueue) -> None:
        """The head of the model has its turn; the next operation may start."""
        if (operation := model.head) is not None:
            model.head = None
            model.next_seq_id += 1
            self._metrics.queue_length.labels(operation.kind).dec()
            self._metrics.queue_seconds.labels(operation.kind).observe(time.perf_counter() - operation.arrived_s)
        self._advance(model)

    async def _run_work(
        self, model: ModelQueue, operation: Operation, work: Callable[[Turn], Coroutine[Any, Any, Answer]]
    ) -> None:
        outcome: Answer | ServiceError
        try:
            outcome = await work(_Turn(self, model, operation))
        except ServiceError as error:
            outcome = error
        except Exception:
            logger.exception("%s of %s, seq_id %d, failed", operation.kind, model.model_id, operation.seq_id)
            outcome = internal_error()
        if operation.seq_id == 0 and isinstance(outcome, ServiceError):
            self._abandon(model, ModelNotFound(f"model_id: the creation of {model.model_id!r} failed: {outcome}"))
        if model.head is operation:
            self._compute.withdraw(model)
            self.taken(model)
        self.settle(model, operation, outcome)

    def settle(self, model: ModelQueue, operation: Operation, outcome: Answer | ServiceError) -> None:
        model.unsettled.discard(operation)
        if operation.outcome.done():
            return
        operation.outcome.set_result(outcome)
        if operation.seq_id == 0:
            self._advance(model)
        failed = isinstance(outcome, ServiceError)
        self._metrics.operations.labels(operation.kind, "failed" if failed else "ok").inc()
        # Batches of several requests run in one task, so its own id would be another's.
        logs.request_id.set(f"{operation.model_id}:{operation.seq_id}")
        logger.info(
            "%s of %s, seq_id %d: %s after %.3f s",
            operation.kind,
            model.model_id,
            operation.seq_id,
            outcome.reason if isinstance(outcome, ServiceError) else "ok",
            time.perf_counter() - operation.arrived_s,
        )
        self.spawn(self._record(model, operation, outcome))

    async def _record(self, model: ModelQueue, operation: Operation, outcome: Answer | ServiceError) -> None:
        try:
            await self._journal.finish(model.model_id, operation.seq_id, outcome)
        except ServiceError:
            logger.exception("the result of %s, seq_id %d, is not stored", model.model_id, operation.seq_id)
        del model.operations[operation.seq_id]
        if operation.seq_id == 0 and model.gone and self._models.get(model.model_id) is model:
            del self._models[model.model_id]
            self._metrics.models.set(len(self._models))

    def _abandon(self, model: ModelQueue, error: ServiceError) -> None:
        """Fails what is queued; what runs goes on."""
        model.gone = error
        ready = model.ready
        self._compute.withdraw(model)
        if isinstance(ready, Call):
            ready.result.set_exception(error)  # its coroutine ends by this
        elif ready is not None:
            model.head = None
        for operation in model.queued:
            if operation is not model.head:
                if operation.work is not None:
                    self._metrics.queue_length.labels(operation.kind).dec()
                self.settle(model, operation, error)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _accepted(operation: Operation) -> Operation:
    """The operation once it is in the journal, or the error that kept it out."""
    error = await asyncio.shield(operation.accepted)
    if error is not None:
        raise error
    return operation


def _same(operation: Operation, body: Body) -> Operation:
    if operation.digest != body.digest:
        raise SequenceConflict(
            f"{operation.model_id}: seq_id {operation.seq_id} was used for another request, a {operation.kind}; "
            "use the next seq_id, or send the same request again",
            model_id=operation.model_id,
            seq_id=operation.seq_id,
        )
    return operation
