"""Accepts operations into the journal, each (model_id, seq_id) once. A repeat gets the first one, running or
finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tinsmith.rpc.errors import (
    InvalidRequest,
    ModelNotFound,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_records import Body, State
from trainer_service.engine.batch import Batch
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation, Work
from trainer_service.scheduling.execution import Execution
from trainer_service.scheduling.held import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.parking import Parking


class Acceptance:
    """Checks new operations against the limits and earlier ones, and appends them to the journal."""

    def __init__(
        self,
        journal: Journal,
        models: ModelQueues,
        parking: Parking,
        execution: Execution,
        held: HeldBytes,
        metrics: Metrics,
        *,
        max_queued_operations: int,
    ) -> None:
        self._journal = journal
        self._models = models
        self._parking = parking
        self._execution = execution
        self._held = held
        self._metrics = metrics
        self._max_queued_operations = max_queued_operations

    async def accept(
        self, model_id: str, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]], *, held_bytes: int
    ) -> Operation:
        """See Scheduler.accept."""
        with self._parking.wanted(model_id):
            return await self._accept(model_id, seq_id, body, build, held_bytes=held_bytes)

    async def _accept(
        self, model_id: str, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]], *, held_bytes: int
    ) -> Operation:
        await self._parking.have(model_id)
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
            if model_id in self._models.unrestored:
                raise self._models.unrestored[model_id]
            await self._journal.check_not_lost(model_id)
            if seq_id != 0:
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            self._held.check_next(model_id, held_bytes)
            async with self._parking.place():
                if model_id not in self._models:
                    model = self._models.open(model_id)
            if model is None:  # a repeat of this creation was accepted meanwhile
                return await self._accept(model_id, seq_id, body, build, held_bytes=held_bytes)
        if model.gone is not None:
            raise model.gone
        # An operation that closes a gap is always taken: others wait for it.
        if seq_id > max(model.operations, default=0) and model.num_queued >= self._max_queued_operations:
            raise OutOfCapacity(
                f"{model_id}: {model.num_queued} operations are queued, this server's max_queued_operations"
            )
        self._check_near(model, seq_id)
        # A model's next operation may exceed the memory limit: the operations that fill it may wait for this one.
        is_next = seq_id == model.next_to_enter and model.has_settled_before(seq_id)
        if seq_id:  # a creation was checked before it got its place in memory
            check = self._held.check_next if is_next else self._held.check
            check(model_id, held_bytes)
        return await self._append(model, seq_id, body, build, held_bytes=held_bytes, is_next=is_next)

    def _check_near(self, model: ModelQueue, seq_id: int) -> None:
        """Raises InvalidRequest for a seq_id before which more operations are missing than the queue could hold."""
        most = self._max_queued_operations
        if seq_id - model.next_to_enter <= most or (ahead := seq_id - model.next_seq_id) <= most:
            return
        raise InvalidRequest(
            f"seq_id: {seq_id} is {ahead} ahead of the next one, {model.next_seq_id}, of {model.model_id}; this server "
            f"accepts operations up to max_queued_operations ({most}) ahead, numbered without gaps",
            field="seq_id",
        )

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired."""
        model = self._models.get(model_id)
        if model is not None and (held := model.operations.get(seq_id)) is not None and not held.replayed:
            return await _accepted(held)
        operation = await self._stored(model_id, seq_id)
        if operation is None:
            raise ResultNotFound(f"{model_id}: no operation with seq_id {seq_id} was accepted")
        return operation

    async def _append(
        self,
        model: ModelQueue,
        seq_id: int,
        body: Body,
        build: Callable[[], Awaitable[Work]],
        *,
        held_bytes: int,
        is_next: bool,
    ) -> Operation:
        """Appends a new operation to the journal while `build` makes its work, and lets it run. Raises the errors of
        both; nothing is accepted then."""
        loop = asyncio.get_running_loop()
        operation = Operation(
            model.model_id,
            seq_id,
            body.kind,
            body.digest,
            accepted=loop.create_future(),
            outcome=loop.create_future(),
            makes_model=seq_id == 0,
        )
        model.operations[seq_id] = operation
        model.used_s = time.monotonic()
        self._held.hold(operation, held_bytes, is_next=is_next)
        try:
            work, _ = await asyncio.gather(build(), self._journal.append(model.model_id, seq_id, body))
        except Exception as error:
            model.operations.pop(seq_id, None)
            self._held.release(operation)
            if seq_id == 0:
                self._models.remove(model.model_id)
            operation.accepted.set_result(
                error if isinstance(error, ServiceError) else ServiceError("internal error; the log has the cause")
            )
            raise
        operation.accepted.set_result(None)
        if not isinstance(work, Batch) and operation.held_bytes:  # a refused batch has no arrays
            self._held.hold(operation, body.num_bytes)
        if not operation.outcome.done():  # the model may have been deleted meanwhile
            self._metrics.operations.queue_length.labels(operation.kind).inc()
            operation.work = work
            self._execution.advance(model)
        return operation

    async def _stored(self, model_id: str, seq_id: int) -> Operation | None:
        """A finished operation from the journal; None when the journal does not have it.

        Raises ModelLost for an unfinished operation of a model that could not be restored.
        """
        record = await self._journal.find(model_id, seq_id)
        if record is None:
            return None
        if record.state == State.ACCEPTED and model_id in self._models.unrestored:
            raise self._models.unrestored[model_id]
        loop = asyncio.get_running_loop()
        operation = Operation(
            model_id, seq_id, record.kind, record.digest, accepted=loop.create_future(), outcome=loop.create_future()
        )
        operation.accepted.set_result(None)
        operation.outcome.set_result(
            record.outcome
            or ResultNotFound(f"{model_id}: the result of seq_id {seq_id} has expired, or was too large to be kept")
        )
        return operation


async def _accepted(operation: Operation) -> Operation:
    """The operation once it is in the journal, or the error that kept it out."""
    error = await asyncio.shield(operation.accepted)
    if error is not None:
        raise error
    return operation


def _same(operation: Operation, body: Body) -> Operation:
    """Returns the operation. Raises SequenceConflict when its body is another one."""
    if operation.digest != body.digest:
        raise SequenceConflict(
            f"{operation.model_id}: seq_id {operation.seq_id} was used for another request, a {operation.kind}; "
            "use the next seq_id, or send the same request again",
            model_id=operation.model_id,
            seq_id=operation.seq_id,
            kind=operation.kind,
        )
    return operation
