"""The order of training operations. Three promises, for each model:

1. Order: operations are executed by seq_id, without gaps, whatever order they arrive in. One that comes early waits; a
   seq_id that never comes is no error. A failed operation, also one that validation refused, uses up its seq_id.
2. Once: the same (model_id, seq_id) again is the same operation, running or finished; with another body it is refused.
3. One at a time: the engine sees one call at a time, on one compute thread.

An operation is accepted when it is in the journal. From then on it lives here, whatever becomes of the call that
brought it, and also after a restart: `restore` puts a model's journalled operations in their places again
(durability/restore.py).

An operation's place on the compute thread is in its model's lane (lanes.py). A batch gets it when the operation before
has got its own. Every other operation is a coroutine that asks for its place, at most once, with `Turn.run`. What it
awaits before delays its own model only. What it awaits after delays only its own result: the model goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.rpc import logs, tracing
from tinsmith.rpc.errors import (
    ModelLost,
    ModelNotFound,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from tinsmith.v1.types_pb2 import QueueStatus
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_records import Body, Entry, State, lost
from trainer_service.metrics import Metrics
from trainer_service.scheduling.compute import ComputeThread, internal_error
from trainer_service.scheduling.lanes import BatchRun, Call, Item
from trainer_service.scheduling.model_queue import ModelQueue, Restoration
from trainer_service.scheduling.queue_status import FINISHED, status_of
from trainer_service.scheduling.work import Answer, BatchEngine, Operation, Output, RunBatch, Turn, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_TOKENS = 8192
"""Results of more tokens become protobuf on a thread, to keep the event loop free."""
_STORE_AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Turn:
    """The Turn that an operation is given."""

    _scheduler: Scheduler
    _model: ModelQueue
    _operation: Operation

    async def run(self, call: Callable[[], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._scheduler._enter(self._model, Call(self._operation, call, result))
        self._scheduler._advance(self._model)
        return await result

    async def settled(self) -> None:
        own = self._operation.seq_id
        if earlier := [operation.outcome for operation in self._model.unsettled if operation.seq_id < own]:
            await asyncio.wait(earlier)

    async def stored(self) -> None:
        own = self._operation.seq_id
        for operation in [one for one in self._model.operations.values() if one.seq_id <= own]:
            await operation.stored.wait()


class Scheduler:
    """See the module's docstring. All methods run on one event loop."""

    def __init__(
        self,
        engine: BatchEngine,
        journal: Journal,
        *,
        max_queued_operations: int,
        max_models: int,
        metrics: Metrics,
        alone: bool = False,
    ) -> None:
        """`alone`: no two batches share a micro-batch."""
        self._journal = journal
        self._max_queued_operations = max_queued_operations
        self._max_models = max_models
        self._metrics = metrics
        self._models: dict[str, ModelQueue] = {}
        self._unrestored: dict[str, ModelLost] = {}
        """Models that this process could not restore."""
        self._compute = ComputeThread(engine, metrics, alone=alone)
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
        if model is not None and (held := model.operations.get(seq_id)) is not None and not held.replayed:
            return await _accepted(held)
        operation = await self._stored(model_id, seq_id)
        if operation is None:
            raise ResultNotFound(f"{model_id}: no operation with seq_id {seq_id} was accepted")
        return operation

    async def describe(self, model_id: str, seq_id: int) -> QueueStatus:
        """What an accepted operation waits for. Raises ResultNotFound when there is none, or its result has expired."""
        operation = await self.find(model_id, seq_id)
        model = self._models.get(model_id)
        if model is not None and model.operations.get(seq_id) is operation:
            return status_of(operation, model, backlog=self._compute.backlog(), speed=self._compute.speed)
        if isinstance(outcome := operation.outcome.result(), ResultNotFound):
            raise outcome
        return FINISHED

    async def run_alone(self, call: Callable[[], T]) -> T:
        """Runs what belongs to no operation on the compute thread, before the next micro-batch."""
        return await self._compute.run_alone(call)

    def next_seq_id(self, model_id: str) -> int:
        return self._models[model_id].next_seq_id

    async def check_held(self, model_id: str) -> None:
        """Waits while the model is being made or restored. Raises ModelLost for one that could not be restored."""
        if (model := self._models.get(model_id)) is not None:
            if model.restoration is not None:
                await model.restoration.is_over.wait()
            if (creation := model.operations.get(0)) is not None:
                await asyncio.shield(creation.outcome)
        if model_id in self._unrestored:
            raise self._unrestored[model_id]
        await self._journal.check_not_lost(model_id)

    def restore(
        self,
        model_id: str,
        history: Sequence[Entry],
        *,
        start: int,
        found: Work,
        work_of: Callable[[Entry], Awaitable[Work]],
        forget: Callable[[], Awaitable[object]],
    ) -> None:
        """Brings a model back from the journal: `found` makes it as it was after operation `start`, or runs operation
        0 again, and the later ones follow. Those that had an answer keep it, and `work_of` makes what they do again.

        When one of those fails that had not, the model is given up, and `forget` frees what there is of it.
        """
        loop = asyncio.get_running_loop()
        known = {entry.seq_id: entry for entry in history if entry.seq_id >= start}
        known.setdefault(start, Entry(start, "create_model", b"", State.DONE, 0))  # its row may be gone
        entries = sorted(known.values(), key=lambda entry: entry.seq_id)
        restoration = Restoration(sum(entry.state != State.ACCEPTED for entry in entries), forget)
        model = self._models[model_id] = ModelQueue(model_id, next_to_enter=start, restoration=restoration)
        self._metrics.models.set(len(self._models))
        for entry in entries:
            operation = model.operations[entry.seq_id] = Operation(
                model_id,
                entry.seq_id,
                entry.kind,
                entry.digest,
                accepted=loop.create_future(),
                outcome=loop.create_future(),
                founds=entry.seq_id == start,
                replayed=entry.state != State.ACCEPTED,
            )
            operation.accepted.set_result(None)
        if not restoration.num_left:
            restoration.is_over.set()

        async def work(entry: Entry) -> Work:
            return found if entry.seq_id == start else await work_of(entry)

        restoration.feeder = loop.create_task(self._feed(model, restoration, entries, work))

    def give_up(self, model_id: str, why: str) -> None:
        """The model cannot be restored by this process; the journal keeps it for another."""
        error = lost(model_id, why)
        logger.error("%s", error)
        self._metrics.unrestored_models.inc()
        self._unrestored[model_id] = error
        model = self._models.pop(model_id, None)
        if model is not None and model.restoration is not None:
            self._metrics.models.set(len(self._models))
            model.restoration.has_failed = True
            self._abandon(model, error)
            model.restoration.is_over.set()
            self.spawn(self._forget(model, model.restoration))

    async def delete(self, model_id: str, call: Callable[[], object]) -> None:
        """Forgets a model: what is queued fails, and so does a batch that is not through when this micro-batch ends.

        What else runs is waited for, then `call` runs on the compute thread.
        """
        self._unrestored.pop(model_id, None)
        model = self._models.pop(model_id, None)
        if model is not None:
            self._metrics.models.set(len(self._models))
            self._abandon(model, ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id))
            if model.unsettled:
                await asyncio.wait([operation.outcome for operation in model.unsettled])
            await self._compute.run_alone(call)
        await self._journal.delete_model(model_id)

    async def close(self, *, timeout_s: float) -> bool:
        """Starts nothing more, no micro-batch either, and waits for what runs.

        What is not through then stays accepted in the journal.
        Returns False when something still ran after `timeout_s` seconds.
        """
        self._closed = True
        for model in self._models.values():
            if model.restoration is not None and model.restoration.feeder is not None:
                model.restoration.feeder.cancel()
        deadline = time.monotonic() + timeout_s
        ended = await self._compute.close(timeout_s=timeout_s)
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - time.monotonic())
        for task in self._tasks:
            task.cancel()
        return ended and not self._tasks

    async def _accept(self, model_id: str, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]]) -> Operation:
        model = self._models.get(model_id)
        held = None if model is None else model.operations.get(seq_id)
        if held is not None and not held.replayed:
            return await _accepted(_same(held, body))
        if model is None or held is not None or seq_id < model.next_to_enter:
            stored = await self._stored(model_id, seq_id)
            if stored is not None:
                return _same(stored, body)
            if model is not None:
                raise ResultNotFound(f"{model_id}: seq_id {seq_id} was executed long ago; its result has expired")
            if model_id in self._unrestored:
                raise self._unrestored[model_id]
            await self._journal.check_not_lost(model_id)
            if seq_id != 0:
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            if model_id in self._models:  # a repeat came meanwhile
                return await self._accept(model_id, seq_id, body, build)
            model = self._new_model(model_id)
        if model.gone is not None:
            raise model.gone
        # One that closes a gap is always taken, or what waits behind the gap would wait for ever.
        if seq_id > max(model.operations, default=0) and model.num_queued >= self._max_queued_operations:
            raise OutOfCapacity(
                f"{model_id}: {model.num_queued} operations are queued, this server's max_queued_operations"
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
            model.model_id,
            seq_id,
            body.kind,
            body.digest,
            accepted=loop.create_future(),
            outcome=loop.create_future(),
            founds=seq_id == 0,
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
        if record.state == State.ACCEPTED and model_id in self._unrestored:
            raise self._unrestored[model_id]
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
        """Starts the model's next operations, up to one that has yet to ask for its place."""
        while not (model.gone or model.head or self._closed):
            operation = model.operations.get(model.next_to_enter)
            if operation is None or operation.work is None:
                return
            if any(earlier.founds for earlier in model.unsettled):  # the model does not exist yet
                return
            model.head = operation
            model.unsettled.add(operation)
            if isinstance(operation.work, RunBatch):
                result: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
                run = BatchRun.of(operation, operation.work.batch, result)
                self._enter(model, run)
                self.spawn(self._run_batch(model, run))
            else:
                self.spawn(self._run_work(model, operation, operation.work))

    def _enter(self, model: ModelQueue, item: Item) -> None:
        """The head of the model gets its place on the compute thread."""
        if model.gone is not None:
            item.result.set_exception(model.gone)
            return
        self._compute.put(model.model_id, item)
        self._leave_head(model)

    def _leave_head(self, model: ModelQueue) -> None:
        model.head = None
        model.next_to_enter += 1

    async def _run_batch(self, model: ModelQueue, run: BatchRun) -> None:
        outcome: Answer | ServiceError
        try:
            output = await run.result
            if run.operation.replayed:
                outcome = Answer()
            elif sum(run.load.lengths) > _LARGE_TOKENS:
                outcome = await asyncio.to_thread(_answer, output)
            else:
                outcome = _answer(output)
        except ServiceError as error:
            outcome = error
        self._settle(model, run.operation, outcome)

    async def _run_work(
        self, model: ModelQueue, operation: Operation, work: Callable[[Turn], Coroutine[Any, Any, Answer]]
    ) -> None:
        outcome: Answer | ServiceError
        tracing.follow(operation.trace)
        logs.request_id.set(f"{operation.model_id}:{operation.seq_id}")
        logs.model_id.set(operation.model_id)
        try:
            outcome = await work(_Turn(self, model, operation))
        except ServiceError as error:
            outcome = error
        except Exception:
            logger.exception("%s of %s, seq_id %d, failed", operation.kind, model.model_id, operation.seq_id)
            outcome = internal_error()
        if operation.seq_id == 0 and not operation.replayed and isinstance(outcome, ServiceError):
            self._abandon(model, ModelNotFound(f"model_id: the creation of {model.model_id!r} failed: {outcome}"))
        if model.head is operation:  # it needs no place
            self._leave_head(model)
            self._advance(model)
        self._settle(model, operation, outcome)

    def _settle(self, model: ModelQueue, operation: Operation, outcome: Answer | ServiceError) -> None:
        model.unsettled.discard(operation)
        if operation.outcome.done():
            return
        operation.outcome.set_result(outcome)
        if not operation.has_begun and operation.work is not None:
            self._metrics.queue_length.labels(operation.kind).dec()
        if (restoration := model.restoration) is not None and operation.seq_id in restoration.fed:
            restoration.fed.discard(operation.seq_id)
            restoration.ahead.release()
        if operation.replayed:
            self._has_replayed(model, operation, outcome)
            return
        if operation.founds:
            self._advance(model)
        failed = isinstance(outcome, ServiceError)
        self._metrics.operations.labels(operation.kind, "failed" if failed else "ok").inc()
        logs.request_id.set(f"{operation.model_id}:{operation.seq_id}")
        logs.model_id.set(operation.model_id)
        logger.info(
            "%s of %s, seq_id %d: %s after %.3f s",
            operation.kind,
            model.model_id,
            operation.seq_id,
            outcome.reason if isinstance(outcome, ServiceError) else "ok",
            time.perf_counter() - operation.arrived_s,
        )
        if failed and operation.kind == "load_checkpoint" and _has_replayed_later(model, operation):
            self.give_up(model.model_id, f"what had been loaded before operations with answers is gone: {outcome}")
        self.spawn(self._record(model, operation, outcome))

    async def _record(self, model: ModelQueue, operation: Operation, outcome: Answer | ServiceError) -> None:
        """Until the answer is stored, the operation is held here; a restart in between would run it again."""
        while model.restoration is None or not model.restoration.has_failed:
            try:
                await self._journal.finish(model.model_id, operation.seq_id, outcome, keep_body=operation.changes_model)
                break
            except ServiceError as error:
                logger.warning(
                    "the result of %s, seq_id %d, is not stored yet: %s", model.model_id, operation.seq_id, error
                )
            if self._closed:
                break
            await asyncio.sleep(_STORE_AGAIN_S)
        del model.operations[operation.seq_id]
        operation.stored.set()
        if operation.seq_id == 0 and model.gone and self._models.get(model.model_id) is model:
            del self._models[model.model_id]
            self._metrics.models.set(len(self._models))

    async def _feed(
        self,
        model: ModelQueue,
        restoration: Restoration,
        history: Sequence[Entry],
        work_of: Callable[[Entry], Awaitable[Work]],
    ) -> None:
        """Gives the operations their works, a few ahead of what runs: bodies take memory."""
        for entry in history:
            await restoration.ahead.acquire()
            operation = model.operations[entry.seq_id]
            try:
                operation.work = await work_of(entry)
            except Exception as error:
                if not isinstance(error, ServiceError):
                    logger.exception("%s, seq_id %d, cannot be read", model.model_id, entry.seq_id)
                restoration.feeder = None
                self.give_up(model.model_id, f"seq_id {entry.seq_id} cannot be read: {error}")
                return
            restoration.fed.add(entry.seq_id)
            self._metrics.queue_length.labels(operation.kind).inc()
            self._advance(model)

    def _has_replayed(self, model: ModelQueue, operation: Operation, outcome: Answer | ServiceError) -> None:
        del model.operations[operation.seq_id]
        operation.stored.set()
        restoration = model.restoration
        assert restoration is not None
        if model.gone is not None:
            return
        if isinstance(outcome, ServiceError):
            self.give_up(
                model.model_id, f"{operation.kind}, seq_id {operation.seq_id}, fails when it runs again: {outcome}"
            )
            return
        self._metrics.replayed_operations.labels(operation.kind).inc()
        logger.debug("%s of %s, seq_id %d, has run again", operation.kind, model.model_id, operation.seq_id)
        if operation.founds:
            self._advance(model)
        restoration.num_left -= 1
        if not restoration.num_left:
            self._metrics.restored_models.inc()
            restoration.is_over.set()

    async def _forget(self, model: ModelQueue, restoration: Restoration) -> None:
        if model.unsettled:
            await asyncio.wait([operation.outcome for operation in model.unsettled])
        await restoration.forget()

    def _abandon(self, model: ModelQueue, error: ServiceError) -> None:
        """Fails what is queued, and what runs in micro-batches at the next one; a call that runs goes on."""
        model.gone = error
        if model.restoration is not None:
            if model.restoration.feeder is not None:
                model.restoration.feeder.cancel()
            model.restoration.is_over.set()
        self._compute.withdraw(model.model_id, error)  # whose operations end by this
        for operation in list(model.operations.values()):
            if operation not in model.unsettled:
                self._settle(model, operation, error)

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


def _has_replayed_later(model: ModelQueue, operation: Operation) -> bool:
    return any(one.replayed and one.seq_id > operation.seq_id for one in model.operations.values())


def _answer(output: Output) -> Answer:
    return Answer(forward_backward=output.to_proto())


def _same(operation: Operation, body: Body) -> Operation:
    if operation.digest != body.digest:
        raise SequenceConflict(
            f"{operation.model_id}: seq_id {operation.seq_id} was used for another request, a {operation.kind}; "
            "use the next seq_id, or send the same request again",
            model_id=operation.model_id,
            seq_id=operation.seq_id,
        )
    return operation
