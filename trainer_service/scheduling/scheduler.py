"""The scheduler of training operations. It makes three promises for each model:

1. Order: operations are executed by seq_id, without gaps, in whatever order they arrive. An early operation waits.
   operations/missing.py decides how long it waits for a seq_id that never arrives. A failed operation uses up its
   seq_id, even if validation refused it.
2. Once: a repeated (model_id, seq_id) is the same operation, running or finished. With another body it is refused.
3. One at a time: the engine gets one call at a time, on one compute thread.

An operation is accepted when it is in the journal. From then on it does not depend on the call that brought it, and
survives a restart (replay.py). execution.py runs it in its turn, and answer_store.py stores its answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tinsmith.cores import Cores
from tinsmith.errors import (
    InvalidRequest,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from trainer_service.durability.executing import Executing, arriving, deletion
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import Body, EntryState
from trainer_service.engine.batch import Batch
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation, Work
from trainer_service.scheduling.answer_store import AnswerStore
from trainer_service.scheduling.compute import BatchEngine, ComputeThread, Running, internal_error
from trainer_service.scheduling.execution import Execution
from trainer_service.scheduling.held_bytes import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.parking import Parking
from trainer_service.scheduling.queue_status import (
    FINISHED,
    Lanes,
    Queue,
    QueueStatus,
    added_up,
    queued_s,
    queued_tokens,
    status_of,
)
from trainer_service.scheduling.tasks import Tasks

logger = logging.getLogger(__name__)


class Scheduler:
    """See the module's docstring. All methods run on one event loop."""

    def __init__(
        self,
        engine: BatchEngine,
        journal: Journal,
        *,
        max_queued_operations: int,
        max_models: int,
        max_known_models: int = 10_000,
        max_queued_bytes: int = 1024**3,
        metrics: Metrics,
        device_type: str = "cpu",
        alone: bool = False,
        executing: Executing | None = None,
        cores: Cores | None = None,
    ) -> None:
        """`device_type`: the engine's, cpu or cuda. `alone`: no two batches share a micro-batch. `executing`: the
        Executing of the journal's folder; made here if it is None. `cores`: None leaves the number of threads
        unchanged."""
        self._journal = journal
        self._metrics = metrics
        self._max_queued_operations = max_queued_operations
        self.tasks = Tasks()
        self.executing = executing = Executing(journal.folder) if executing is None else executing
        self.cores = cores or Cores("", most=0, set_threads=lambda _: None)
        self.models = ModelQueues(metrics, max_models=max_models, max_known_models=max_known_models)
        self.held = HeldBytes(metrics, max_bytes=max_queued_bytes)
        self.parking = Parking(self.models, self.held, metrics, self.tasks)
        self.compute = ComputeThread(engine, metrics, executing, self.cores, device_type=device_type, alone=alone)
        answers = AnswerStore(journal, self.models, self.held, executing, metrics, self.tasks)
        self.execution = Execution(self.compute, self.models, self.held, answers, executing, metrics, self.tasks)
        self.replay = self.execution.replay
        self._queue = Queue(self.compute.backlog)
        # These are called on the thread that serves the metrics.
        metrics.operations.queued_seconds.set_function(lambda: queued_s(*self._added_up(), self.compute.speed))
        metrics.operations.queued_tokens.set_function(lambda: queued_tokens(*self._added_up()))

    async def accept(
        self, model_id: str, seq_id: int, body: Body, *, message_bytes: int = 0, held_bytes: int | None = None
    ) -> tuple[Operation, bool]:
        """Accepts an operation, which is then being appended to the journal. Operation 0 makes the model.

        Returns the operation, and True when it is new: the caller must then give its work to `begin`. A repeat returns
        the first operation, once it is in the journal. `message_bytes`: memory of the request's message, in bytes; 0
        means the size of its body. `held_bytes`: memory that the operation will hold, in bytes; None means that of its
        message.

        Raises ModelNotFound, ModelLost, SequenceConflict, OutOfCapacity, InvalidRequest for a seq_id that is too far
        ahead, and ResultNotFound for a repeat whose result has expired.
        """
        message_bytes = min(message_bytes or body.num_bytes, self.held.max_operation_bytes)
        held_bytes = message_bytes if held_bytes is None else held_bytes
        with self.models.wanted(model_id):
            return await self._accept(model_id, seq_id, body, message_bytes=message_bytes, held_bytes=held_bytes)

    async def begin(self, operation: Operation, work: Work) -> None:
        """Lets a new operation run, once it is in the journal. `work`: for a refused request, work that fails. Raises
        the error that kept the operation out of the journal."""
        await _accepted(operation)
        operation.is_arriving = False
        if not isinstance(work, Batch) and operation.held_bytes:  # a refused batch has no arrays
            self.held.hold(operation, operation.message_bytes)
        if not operation.outcome.done():  # the model may have been deleted in the meantime
            self._metrics.operations.queue_length.labels(operation.kind).inc()
            operation.work = work
            self.execution.advance(self.models[operation.model_id])

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired, ModelMoved, and
        NotReady for an operation that has not run of a model that is on its way into memory."""
        self.models.check_not_moved(model_id)
        model = self.models.get_queue(model_id)
        if model is not None and (held := model.operations.get(seq_id)) is not None and not held.replayed:
            return await _accepted(held)
        operation = await self._stored(model_id, seq_id)
        if operation is None:
            raise ResultNotFound(f"{model_id}: no operation with seq_id {seq_id} was accepted")
        return operation

    async def describe(self, model_id: str, seq_id: int) -> QueueStatus:
        """Describes what an accepted operation waits for. Raises ResultNotFound as `find` does."""
        operation = await self.find(model_id, seq_id)
        model = self.models.get_queue(model_id)
        if model is not None and model.operations.get(seq_id) is operation:
            lanes, running = self._queue.lanes(), self.compute.running
            return status_of(operation, model, lanes=lanes, running=running, speed=self.compute.speed)
        if isinstance(outcome := operation.outcome.result(), ResultNotFound):
            raise outcome
        return FINISHED

    def queued_s(self) -> float:
        """Expected time until all work that waits has run, in seconds; 0 before the first measurement."""
        return queued_s(self._queue.lanes(), self.compute.running, self.compute.speed)

    def _added_up(self) -> tuple[Lanes, Running | None]:
        """All lanes, and the work that runs."""
        return added_up(backlog := self.compute.backlog()), backlog.running

    async def check_held(self, model_id: str) -> None:
        """Waits while the model is being made or restored, and brings it back if it is parked. Raises ModelLost for a
        model that could not be restored, ModelMoved, and OutOfCapacity when there is no place for it in memory."""
        with self.models.wanted(model_id):
            await self.parking.have(model_id)
            self.models.check_not_moved(model_id)
            if (model := self.models.get(model_id)) is not None:
                if model.restoration is not None:
                    await model.restoration.is_over.wait()
                if (creation := model.operations.get(0)) is not None:
                    await asyncio.shield(creation.outcome)
            if model_id in self.models.unrestored:
                raise self.models.unrestored[model_id]
            await self._journal.check_not_lost(model_id)

    async def delete(self, model_id: str, call: Callable[[], object]) -> None:
        """Deletes a model. Its queued operations fail, and so does a batch that needs more than the current
        micro-batch.

        Waits for its other running operations, then runs `call` on the compute thread. Raises ServiceError for a
        deletion that has ended the process too often.
        """
        name = deletion(model_id)
        self.executing.check(*name)
        await self.parking.settled(model_id)
        self.models.check_not_moved(model_id)
        self.models.unrestored.pop(model_id, None)
        self.models.parked.discard(model_id)
        was_deleted = ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id)
        self.models.fail_waiting(model_id, was_deleted)
        model = self.models.remove(model_id)
        if model is not None:
            self.execution.abandon(model, was_deleted)
            if model.unsettled:
                await asyncio.wait([operation.outcome for operation in model.unsettled])
            await self.compute.run_alone(call, name=name)
        async with self.executing.stage(*name):
            await self._journal.delete_model(model_id)
        self.executing.forget_model(model_id)

    async def close(self, *, timeout_s: float) -> bool:
        """Starts no further operation or micro-batch, and waits for the current work. Unfinished operations stay
        accepted in the journal.

        Returns False when something still runs after `timeout_s` seconds, or when the engine has died.
        """
        self.tasks.is_closing = True
        self.replay.stop()
        deadline_s = time.monotonic() + timeout_s
        ended = await self.compute.close(timeout_s=timeout_s)
        all_ended = await self.tasks.close(until_s=deadline_s, died=self.compute.engine_died)
        return ended and all_ended and not self.compute.engine_died.is_set()

    async def _accept(
        self, model_id: str, seq_id: int, body: Body, *, message_bytes: int, held_bytes: int
    ) -> tuple[Operation, bool]:
        """Checks a new operation against the limits and earlier ones, and starts to append it to the journal."""
        waiting = self.models.waiting.get(model_id)
        if waiting is not None and (held := waiting.operations.get(seq_id)) is not None:
            return _same(held, body), False  # a repeat of an operation that waits for another does not need the model
        if self.models.is_away(model_id):
            await self.parking.have(model_id)
        self.models.check_not_moved(model_id)
        model = self.models.get(model_id)
        held = None if model is None else model.operations.get(seq_id)
        if held is not None and not held.replayed:
            return await _accepted(_same(held, body)), False
        if model is None or held is not None or seq_id < model.next_to_enter:
            stored = await self._stored(model_id, seq_id)
            if stored is not None:
                return _same(stored, body), False
            if model is not None:
                raise ResultNotFound(f"{model_id}: seq_id {seq_id} was executed long ago; its result has expired")
            if model_id in self.models.unrestored:
                raise self.models.unrestored[model_id]
            await self._journal.check_not_lost(model_id)
            if seq_id != 0:
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            self.held.check_next(model_id, held_bytes)
            async with self.parking.place():
                if model_id not in self.models:
                    model = self.models.open(model_id)
            if model is None:  # a repeat of this creation was accepted meanwhile
                return await self._accept(model_id, seq_id, body, message_bytes=message_bytes, held_bytes=held_bytes)
        if model.gone is not None:
            raise model.gone
        # An operation that closes a gap is always accepted, because others wait for it.
        closes_gap = seq_id <= max(model.operations, default=0)
        if not closes_gap and model.num_queued >= self._max_queued_operations:
            self._check_near(model, seq_id, still_queued=model.num_queued)
            raise OutOfCapacity(
                f"{model_id}: {model.num_queued} operations are queued, this server's max_queued_operations"
            )
        self._check_near(model, seq_id)
        # A model's next operation may exceed the memory limit, because the operations that fill the memory may wait for
        # it.
        is_next = seq_id == model.next_to_enter and model.has_settled_before(seq_id)
        if seq_id:  # a creation was checked before it got its place in memory
            check = self.held.check_next if is_next else self.held.check
            check(model_id, held_bytes)
        loop = asyncio.get_running_loop()
        operation = Operation(
            model_id,
            seq_id,
            body.kind,
            body.digest,
            message_bytes=message_bytes,
            accepted=loop.create_future(),
            outcome=loop.create_future(),
            is_arriving=True,
            makes_model=seq_id == 0,
        )
        model.operations[seq_id] = operation
        model.used_s = time.monotonic()
        self.held.hold(operation, held_bytes, is_next=is_next)
        self.tasks.spawn(self._append(model, operation, body, within_share=not (is_next or closes_gap)))
        return operation, True

    def _check_near(self, model: ModelQueue, seq_id: int, *, still_queued: int = 0) -> None:
        """Raises InvalidRequest for a seq_id before which more operations are missing than the queue could hold.
        `still_queued`: operations that will have left the queue before there is room for this one."""
        most = self._max_queued_operations
        ahead = seq_id - model.next_seq_id
        if seq_id - model.next_to_enter - still_queued <= most or ahead - still_queued <= most:
            return
        raise InvalidRequest(
            f"seq_id: {seq_id} is {ahead} ahead of the next one, {model.next_seq_id}, of {model.model_id}; this server "
            f"accepts operations up to max_queued_operations ({most}) ahead, numbered without gaps",
            field="seq_id",
        )

    async def _append(self, model: ModelQueue, operation: Operation, body: Body, *, within_share: bool) -> None:
        """Appends a new operation to the journal. After an error nothing of the operation is left."""
        error: ServiceError | None = None
        arrival = arriving(operation.kind, model.model_id), operation.seq_id
        try:
            self.executing.check(*arrival)
            async with self.executing.stage(*arrival):
                await self._journal.append(model.model_id, operation.seq_id, body, within_share=within_share)
            self.executing.forget(*arrival)
        except ServiceError as caught:
            error = caught
        except Exception:
            logger.exception("%s, seq_id %d, cannot be appended to the journal", model.model_id, operation.seq_id)
            error = internal_error()
        if error is not None:
            model.operations.pop(operation.seq_id, None)
            self.held.release(operation)
            if operation.seq_id == 0:
                self.models.remove(model.model_id)
        operation.accepted.set_result(error)

    async def _stored(self, model_id: str, seq_id: int) -> Operation | None:
        """A finished operation from the journal. None when the journal does not have the operation, or has it although
        its acceptance was never acknowledged.

        Raises ModelLost for an unfinished operation of a model that could not be restored.
        """
        record = await self._journal.find(model_id, seq_id)
        if record is None:
            return None
        if record.state == EntryState.ACCEPTED and model_id in self.models.unrestored:
            raise self.models.unrestored[model_id]
        if record.state == EntryState.ACCEPTED and self.models.is_away(model_id):
            raise NotReady(f"{model_id} is on its way into memory; try again")
        if record.state == EntryState.ACCEPTED and model_id not in self.models:
            return None  # a creation that was appended in an outage of the journal, and never acknowledged
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
