"""The scheduler of training operations. It makes three promises for each model:

1. Order: operations are executed by seq_id, without gaps, in whatever order they arrive. An early operation waits.
   operations/missing.py decides how long it waits for a seq_id that never arrives. A failed operation uses up its
   seq_id, even if validation refused it.
2. Once: a repeated (model_id, seq_id) is the same operation, running or finished. With another body it is refused.
3. One at a time: the engine gets one call at a time, on one compute thread.

An operation is accepted when it is in the journal. From then on it does not depend on the call that brought it, and
survives a restart (replay.py). It is executed in its turn: it gets a place on the compute thread, in its model's lane
(packing.py). A batch gets it as soon as the operation before it has its own. Every other operation is a coroutine that
asks for its place with `Turn.run`, at most once. While it waits for something before that, only its own model is
delayed. After that, only its own result is delayed. When it has its outcome, it is settled: the outcome is logged,
counted and stored in the journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.cores import Cores
from tinsmith.errors import (
    InvalidRequest,
    ModelMoved,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    ResultNotFound,
    SequenceConflict,
    ServiceError,
)
from tinsmith.rpc import logs, tracing
from tinsmith.threads import in_pool
from trainer_service.durability.executing import Executing, Name, arriving, deletion
from trainer_service.durability.journal import Body, Entry, EntryState, Journal
from trainer_service.durability.journal_database import Unstorable
from trainer_service.engine.batch import Batch, Output
from trainer_service.metrics import Metrics
from trainer_service.operation import Answer, Call, Operation, Outcome, Turn, Work
from trainer_service.requests import answer_of
from trainer_service.scheduling.compute import BatchEngine, ComputeThread, Pace, internal_error
from trainer_service.scheduling.model_queue import HeldBytes, ModelQueue, ModelQueues
from trainer_service.scheduling.parking import Parking
from trainer_service.scheduling.queue_status import FINISHED, QueueStatus, queued_s, queued_tokens, status_of
from trainer_service.scheduling.replay import Replay

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_TOKENS = 8192
"""Results of more tokens are converted to protobuf on a thread, to keep the event loop free."""
_STORE_AGAIN_S = 1.0
"""Pause before the second attempt to store an answer, in seconds. It doubles with each attempt."""
_BRING_BACK_AGAIN_S = 1.0
"""Pause between two attempts to bring back a model that has work, in seconds."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause between attempts to store an answer, in seconds."""


@dataclass(frozen=True, slots=True)
class Gap:
    """An operation that has not arrived, and for which others of its model wait."""

    model_id: str
    seq_id: int
    """seq_id of the missing operation."""
    behind: frozenset[int]
    """seq_ids of the operations that wait for it."""


async def _unchanged(entry: Entry, work: Work) -> Work:
    return work


@dataclass(slots=True, eq=False)
class _Turn:
    """The Turn of one operation."""

    _scheduler: Scheduler
    _model: ModelQueue
    _operation: Operation

    async def run(self, call: Callable[[], T], *, canary_tokens: int | None = None) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._operation.call = Call(self._operation, call, result, canary_tokens)
        self._scheduler.enter(self._model, self._operation, result)
        self._scheduler.advance(self._model)
        return await result

    @asynccontextmanager
    async def storing(self) -> AsyncIterator[None]:
        executing, name = self._scheduler.executing, (self._model.model_id, self._operation.seq_id)
        await executing.turn_to_store(*name, of_model=self._operation.replayed)
        with executing.storing(*name):
            yield

    async def settled(self) -> None:
        own = self._operation.seq_id
        if earlier := [operation.outcome for operation in self._model.unsettled if operation.seq_id < own]:
            await asyncio.wait(earlier)

    async def earlier_stored(self) -> None:
        await self._stored_before(self._operation.seq_id)

    async def stored(self) -> None:
        await self._stored_before(self._operation.seq_id + 1)

    async def _stored_before(self, seq_id: int) -> None:
        for operation in [one for one in self._model.operations.values() if one.seq_id < seq_id]:
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
        self.tasks: set[asyncio.Task[Any]] = set()
        self._models = ModelQueues(metrics, max_models=max_models, max_known_models=max_known_models)
        self.parking = Parking(self._models, metrics, self.spawn)
        self._held = HeldBytes(metrics, max_bytes=max_queued_bytes)
        self.executing = Executing(journal.folder) if executing is None else executing
        self.cores = cores or Cores("", most=0, set_threads=lambda _: None)
        self._metrics = metrics
        self._max_queued_operations = max_queued_operations
        self._compute = ComputeThread(engine, metrics, self.executing, self.cores, device_type=device_type, alone=alone)
        self._replay = Replay(self._models, self.advance, self.abandon, self.ends_with, self._held, metrics, self.spawn)
        self._closed = False
        metrics.operations.queued_seconds.set_function(self.queued_s)
        metrics.operations.queued_tokens.set_function(lambda: sum(queued_tokens(self._compute.backlog())))

    @property
    def engine_died(self) -> asyncio.Event:
        """Set when nothing can be computed any more. The process must end; a restart runs the journal's operations."""
        return self._compute.engine_died

    def ends_with(self, error: Exception, name: Name) -> bool:
        """True for an error after which nothing can be computed, and which some work outside the compute thread has
        met. Then `engine_died` is set, and the work must have no result. `name`: that of the work, to which the end of
        the process counts as a death."""
        return self._compute.ends_with(error, name)

    @property
    def max_operation_bytes(self) -> int:
        """Memory of the largest operation that can ever be accepted, in bytes."""
        return self._held.max_operation_bytes

    async def accept(
        self, model_id: str, seq_id: int, body: Body, *, held_bytes: int | None = None
    ) -> tuple[Operation, bool]:
        """Accepts an operation, which is then being appended to the journal. Operation 0 makes the model.

        Returns the operation, and True when it is new: the caller must then give its work to `begin`. A repeat returns
        the first operation, once it is in the journal. `held_bytes`: memory that the operation will hold, in bytes;
        None means that of its body.

        Raises ModelNotFound, ModelLost, SequenceConflict, OutOfCapacity, InvalidRequest for a seq_id that is too far
        ahead, and ResultNotFound for a repeat whose result has expired.
        """
        held_bytes = min(body.num_bytes, self.max_operation_bytes) if held_bytes is None else held_bytes
        with self._models.wanted(model_id):
            return await self._accept(model_id, seq_id, body, held_bytes=held_bytes)

    async def begin(self, operation: Operation, work: Work) -> None:
        """Lets a new operation run, once it is in the journal. `work`: for a refused request, work that fails. Raises
        the error that kept the operation out of the journal."""
        await _accepted(operation)
        if not isinstance(work, Batch) and operation.held_bytes:  # a refused batch has no arrays
            self._held.hold(operation, operation.num_bytes)
        if not operation.outcome.done():  # the model may have been deleted meanwhile
            self._metrics.operations.queue_length.labels(operation.kind).inc()
            operation.work = work
            self.advance(self._models[operation.model_id])

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired, ModelMoved, and
        NotReady for an operation that has not run of a model that is on its way into memory."""
        self._check_not_moved(model_id)
        model = self._models.get(model_id)
        if model is not None and (held := model.operations.get(seq_id)) is not None and not held.replayed:
            return await _accepted(held)
        operation = await self._stored(model_id, seq_id)
        if operation is None:
            raise ResultNotFound(f"{model_id}: no operation with seq_id {seq_id} was accepted")
        return operation

    async def describe(self, model_id: str, seq_id: int) -> QueueStatus:
        """Describes what an accepted operation waits for. Raises ResultNotFound as `find` does."""
        operation = await self.find(model_id, seq_id)
        model = self._models.get(model_id)
        if model is not None and model.operations.get(seq_id) is operation:
            return status_of(operation, model, backlog=self._compute.backlog(), speed=self._compute.speed)
        if isinstance(outcome := operation.outcome.result(), ResultNotFound):
            raise outcome
        return FINISHED

    def pace(self) -> Pace:
        return self._compute.pace()

    def queued_s(self) -> float:
        """Expected time until all work that waits has run, in seconds; 0 before the first measurement."""
        return queued_s(self._compute.backlog(), self._compute.speed)

    @property
    def num_models(self) -> int:
        """Number of live models, in memory or parked."""
        return self._models.num_known

    async def run_alone(
        self, call: Callable[[], T], *, canary_tokens: int | None = None, name: Name | None = None
    ) -> T:
        """Runs what belongs to no operation on the compute thread, before the next micro-batch. For the other arguments
        see Call."""
        return await self._compute.run_alone(call, canary_tokens=canary_tokens, name=name)

    def gaps(self) -> list[Gap]:
        """The missing operations, one of each model whose accepted operations all wait for one that has not arrived."""
        return [
            Gap(model.model_id, model.next_to_enter, behind)
            for model in self._models
            if (model.restoration is None or model.restoration.is_over.is_set())
            and model.next_to_enter not in model.operations
            and (behind := frozenset(seq_id for seq_id in model.operations if seq_id > model.next_to_enter))
        ]

    def is_queued(self, model_id: str, seq_id: int) -> bool:
        """False for an operation whose model was deleted."""
        model = self._models.get(model_id)
        return model is not None and seq_id in model.operations

    def next_seq_id(self, model_id: str) -> int:
        return self._models[model_id].next_seq_id

    async def check_held(self, model_id: str) -> None:
        """Waits while the model is being made or restored, and brings it back if it is parked. Raises ModelLost for a
        model that could not be restored, ModelMoved, and OutOfCapacity when there is no place for it in memory."""
        with self._models.wanted(model_id):
            await self.parking.have(model_id)
            self._check_not_moved(model_id)
            await self._check_held(model_id)

    async def _check_held(self, model_id: str) -> None:
        if (model := self._models.get(model_id)) is not None:
            if model.restoration is not None:
                await model.restoration.is_over.wait()
            if (creation := model.operations.get(0)) is not None:
                await asyncio.shield(creation.outcome)
        if model_id in self._models.unrestored:
            raise self._models.unrestored[model_id]
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
        checked: Callable[[Entry, Work], Awaitable[Work]] = _unchanged,
        unparks: bool = False,
    ) -> None:
        """Begins to bring a model back from the journal.

        `found`: work that makes the model as it was after operation `start`, or runs operation 0 again. The later
        operations of `history` follow. `work_of` makes the work of each; operations with an answer keep it. `checked`
        checks the work that `work_of` has made, which may take long, and returns the work to run.

        When an operation with an answer fails now, the model is given up, and `forget` frees its memory. `unparks`: the
        model was parked.
        """
        self._replay.begin(
            model_id,
            history,
            start=start,
            found=found,
            work_of=work_of,
            checked=checked,
            forget=forget,
            unparks=unparks,
        )

    async def restored(self, model_id: str) -> None:
        """Returns when a model that `restore` brings back is restored, or has been given up and its memory freed."""
        model = self._models.get(model_id)
        if model is None or (restoration := model.restoration) is None:
            return
        await restoration.is_over.wait()
        if restoration.forgetting is not None:
            await asyncio.wait([restoration.forgetting])

    async def in_memory(self, model_id: str) -> None:
        """Returns when a model that `restore` brings back is in memory as its snapshot has it, before its later
        operations have run. Returns as `restored` does if the model is given up."""
        model = self._models.get(model_id)
        if model is None or (restoration := model.restoration) is None:
            return
        first = next((operation for operation in model.operations.values() if operation.makes_model), None)
        if first is not None:
            await asyncio.shield(first.outcome)
        if restoration.forgetting is not None:
            await asyncio.wait([restoration.forgetting])

    def leave_parked(self, model_id: str) -> None:
        """Notes a model of the journal as parked. The model is restored when a request needs it."""
        self._models.parked.add(model_id)

    def bring_back(self, model_id: str) -> None:
        """Brings a parked model back, in the background, because it has operations that have not run. Tries again while
        there is no place for it."""

        async def have() -> None:
            while not self._closed:
                try:
                    with self._models.wanted(model_id):
                        return await self.parking.have(model_id)
                except (OutOfCapacity, NotReady) as error:
                    logger.warning("%s waits for its place in memory: %s", model_id, error)
                await asyncio.sleep(_BRING_BACK_AGAIN_S)

        self.spawn(have())

    # Models that move to another trainer

    def _check_not_moved(self, model_id: str) -> None:
        if (moved := self._models.moved.get(model_id)) is not None:
            raise moved

    def has_moved(self, model_id: str) -> bool:
        """True for a model that was released, or is being released."""
        return model_id in self._models.moved

    def is_parked(self, model_id: str) -> bool:
        return model_id in self._models.parked

    def is_known(self, model_id: str) -> bool:
        """True for a model in memory, parked, or on its way between the two, and for one that was given up."""
        models = self._models
        return model_id in models or models.is_away(model_id) or model_id in models.unrestored

    def set_moved(self, model_id: str, error: ServiceError) -> None:
        """From now on, every call for the model fails with `error`."""
        self._models.moved[model_id] = error

    async def withhold(self, model_id: str, error: ModelMoved) -> int | None:
        """Stops a model between two operations. From then on every call for the model fails with `error`, and so do its
        accepted operations that have not begun; they stay in the journal. Waits for those that have begun, and until
        all answers are stored.

        Returns the seq_id of the last operation that has run; None for a parked model. Then `set_aside` or `resume`
        must be called. Raises ModelNotFound, ModelLost, and the error of a model that is being deleted.
        """
        while True:
            await self.parking.settled(model_id)
            if model_id in self._models.parked:
                self._models.parked.remove(model_id)
                self._models.moved[model_id] = error
                return None
            model = self._models.get(model_id)
            if model is None:
                await self._check_held(model_id)
                if model_id in self._models or self._models.is_away(model_id):
                    continue
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            if model.gone is not None:
                raise model.gone
            creation = model.operations.get(0)
            is_over = model.restoration is None or model.restoration.is_over.is_set()
            if is_over and (creation is None or creation.outcome.done()):
                break
            with self._models.wanted(model_id):
                await self._check_held(model_id)
        self._models.moved[model_id] = model.gone = error
        if model.restoration is not None and model.restoration.feeder is not None:
            model.restoration.feeder.cancel()
        operations = list(model.operations.values())
        self._compute.withhold(model_id, error)
        for operation in operations:
            # The head may wait for operations that are withheld, such as a load for a save.
            if operation not in model.unsettled or operation is model.head:
                self.settle(model, operation, error)
        for operation in operations:
            await asyncio.shield(operation.accepted)
            await asyncio.shield(operation.outcome)
            await operation.stored.wait()
        withheld = [operation.seq_id for operation in operations if operation.outcome.result() is error]
        return min([model.next_to_enter, *withheld]) - 1

    def set_aside(self, model_id: str) -> None:
        """Removes a withheld model from memory."""
        self._models.remove(model_id)

    def resume(self, model_id: str, *, is_covered: bool) -> None:
        """Lets a withheld model, which is not in memory, go on from its snapshot and the journal. `is_covered`: no
        operation of it waits."""
        self._models.remove(model_id)
        self._models.moved.pop(model_id, None)
        self.leave_parked(model_id)
        if not is_covered:
            self.bring_back(model_id)

    def forget_moved(self, model_id: str, move_id: str) -> None:
        """Forgets a model that was released in this move: calls for it fail from now on because there is none."""
        error = self._models.moved.get(model_id)
        if error is not None and error.metadata.get("move_id") == move_id:
            del self._models.moved[model_id]

    def give_up(self, model_id: str, why: str) -> None:
        """Records that this process cannot restore a model. The journal keeps it for the next process."""
        self._replay.give_up(model_id, why)

    async def delete(self, model_id: str, call: Callable[[], object]) -> None:
        """Deletes a model. Its queued operations fail, and so does a batch that needs more than the current
        micro-batch.

        Waits for its other running operations, then runs `call` on the compute thread. Raises ServiceError for a
        deletion that has ended the process too often.
        """
        name = deletion(model_id)
        self.executing.check(*name)
        await self.parking.settled(model_id)
        self._check_not_moved(model_id)
        self._models.unrestored.pop(model_id, None)
        self._models.parked.discard(model_id)
        model = self._models.remove(model_id)
        if model is not None:
            self.abandon(model, ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id))
            if model.unsettled:
                await asyncio.wait([operation.outcome for operation in model.unsettled])
            await self._compute.run_alone(call, name=name)
        async with self.executing.stage(*name):
            await self._journal.delete_model(model_id)
        self.executing.forget_model(model_id)

    async def close(self, *, timeout_s: float) -> bool:
        """Starts no further operation or micro-batch, and waits for the current work. Unfinished operations stay
        accepted in the journal.

        Returns False when something still runs after `timeout_s` seconds, or when the engine has died.
        """
        self._closed = True
        self._replay.stop()
        deadline = time.monotonic() + timeout_s
        ended = await self._compute.close(timeout_s=timeout_s)
        while self.tasks and time.monotonic() < deadline and not self.engine_died.is_set():
            await asyncio.wait(self.tasks, timeout=deadline - time.monotonic())
        for task in self.tasks:
            task.cancel()
        return ended and not self.tasks and not self.engine_died.is_set()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that `close` waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Acceptance

    async def _accept(self, model_id: str, seq_id: int, body: Body, *, held_bytes: int) -> tuple[Operation, bool]:
        """Checks a new operation against the limits and earlier ones, and starts to append it to the journal."""
        if self._models.is_away(model_id):
            await self.parking.have(model_id)
        self._check_not_moved(model_id)
        model = self._models.get(model_id)
        held = None if model is None else model.operations.get(seq_id)
        if held is not None and not held.replayed:
            return await _accepted(_same(held, body)), False
        if model is None or held is not None or seq_id < model.next_to_enter:
            stored = await self._stored(model_id, seq_id)
            if stored is not None:
                return _same(stored, body), False
            if model is not None:
                raise ResultNotFound(f"{model_id}: seq_id {seq_id} was executed long ago; its result has expired")
            if model_id in self._models.unrestored:
                raise self._models.unrestored[model_id]
            await self._journal.check_not_lost(model_id)
            if seq_id != 0:
                raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
            self._held.check_next(model_id, held_bytes)
            async with self.parking.place():
                if model_id not in self._models:
                    model = self._models.open(model_id)
            if model is None:  # a repeat of this creation was accepted meanwhile
                return await self._accept(model_id, seq_id, body, held_bytes=held_bytes)
        if model.gone is not None:
            raise model.gone
        # An operation that closes a gap is always taken: others wait for it.
        closes_gap = seq_id <= max(model.operations, default=0)
        if not closes_gap and model.num_queued >= self._max_queued_operations:
            raise OutOfCapacity(
                f"{model_id}: {model.num_queued} operations are queued, this server's max_queued_operations"
            )
        self._check_near(model, seq_id)
        # A model's next operation may exceed the memory limit: the operations that fill it may wait for this one.
        is_next = seq_id == model.next_to_enter and model.has_settled_before(seq_id)
        if seq_id:  # a creation was checked before it got its place in memory
            check = self._held.check_next if is_next else self._held.check
            check(model_id, held_bytes)
        loop = asyncio.get_running_loop()
        operation = Operation(
            model_id,
            seq_id,
            body.kind,
            body.digest,
            num_bytes=body.num_bytes,
            accepted=loop.create_future(),
            outcome=loop.create_future(),
            makes_model=seq_id == 0,
        )
        model.operations[seq_id] = operation
        model.used_s = time.monotonic()
        self._held.hold(operation, held_bytes, is_next=is_next)
        self.spawn(self._append(model, operation, body, within_share=not (is_next or closes_gap)))
        return operation, True

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

    async def _append(self, model: ModelQueue, operation: Operation, body: Body, *, within_share: bool) -> None:
        """Appends a new operation to the journal. After an error nothing of it is left."""
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
            self._held.release(operation)
            if operation.seq_id == 0:
                self._models.remove(model.model_id)
        operation.accepted.set_result(error)

    async def _stored(self, model_id: str, seq_id: int) -> Operation | None:
        """A finished operation from the journal; None when the journal does not have it, or has it without anybody
        having been told.

        Raises ModelLost for an unfinished operation of a model that could not be restored.
        """
        record = await self._journal.find(model_id, seq_id)
        if record is None:
            return None
        if record.state == EntryState.ACCEPTED and model_id in self._models.unrestored:
            raise self._models.unrestored[model_id]
        if record.state == EntryState.ACCEPTED and self._models.is_away(model_id):
            raise NotReady(f"{model_id} is on its way into memory; try again")
        if record.state == EntryState.ACCEPTED and model_id not in self._models:
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

    # Execution

    def advance(self, model: ModelQueue) -> None:
        """Starts the model's next operations, up to the first that does not ask for its place at once."""
        while not (model.gone or model.head or self._closed):
            operation = model.operations.get(model.next_to_enter)
            if operation is None or operation.work is None:
                return
            if any(earlier.makes_model for earlier in model.unsettled):  # the model is still being made
                return
            model.head = operation
            model.unsettled.add(operation)
            if isinstance(operation.work, Batch):
                self.spawn(self._run_batch(model, operation, self._enter_batch(model, operation, operation.work)))
            else:
                self.spawn(self._run_work(model, operation, operation.work))

    def _enter_batch(self, model: ModelQueue, operation: Operation, batch: Batch) -> asyncio.Future[Output]:
        """Gives a batch its place on the compute thread. Returns its result."""
        if (speed := self._compute.loss_speed) is not None:
            more = [speed.loss_tokens(datum.loss_s) if datum.loss_s else 0 for datum in batch.datums]
            batch.set_costs([charge + tokens for charge, tokens in zip(batch.charges, more, strict=True)])
        batch.alone = self.executing.is_suspect(model.model_id, operation.seq_id)
        result: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self.enter(model, operation, result)
        return result

    def enter(self, model: ModelQueue, operation: Operation, result: asyncio.Future[Any]) -> None:
        """Gives the model's head its place on the compute thread, which will set `result`."""
        operation.result = result
        if model.gone is not None:
            result.set_exception(model.gone)
            return
        self._compute.put(operation)
        _leave_head(model)

    def settle(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Sets the operation's outcome, unless it has one."""
        model.unsettled.discard(operation)
        if operation.outcome.done():
            return
        operation.outcome.set_result(outcome)
        if not operation.has_begun and operation.work is not None:
            self._metrics.operations.queue_length.labels(operation.kind).dec()
        self._has_settled(model, operation, outcome)

    def abandon(self, model: ModelQueue, error: ServiceError) -> None:
        """Fails the model's queued operations, and a running batch before its next micro-batch. A running call goes
        on."""
        model.gone = error
        if model.restoration is not None:
            if model.restoration.feeder is not None:
                model.restoration.feeder.cancel()
            model.restoration.is_over.set()
        self._compute.withdraw(model.model_id, error)  # ends the operations that have a place on the compute thread
        for operation in list(model.operations.values()):
            if operation not in model.unsettled:
                self.settle(model, operation, error)

    async def _run_batch(self, model: ModelQueue, operation: Operation, result: asyncio.Future[Output]) -> None:
        outcome: Outcome
        try:
            output = await result
            if operation.replayed:
                outcome = Answer()
            else:
                async with self.executing.stage(model.model_id, operation.seq_id):
                    large = operation.batch is not None and operation.batch.num_tokens > _LARGE_TOKENS
                    outcome = await in_pool(_answer, output) if large else _answer(output)
        except ServiceError as error:
            outcome = error
        except Exception as error:  # making the answer failed; the compute thread itself raises only ServiceError
            if self.ends_with(error, (model.model_id, operation.seq_id)):
                return
            logger.exception("%s, seq_id %d: no answer can be made", model.model_id, operation.seq_id)
            outcome = internal_error()
        self.settle(model, operation, outcome)

    async def _run_work(
        self, model: ModelQueue, operation: Operation, work: Callable[[Turn], Coroutine[Any, Any, Answer]]
    ) -> None:
        outcome: Outcome
        tracing.follow(operation.trace)
        logs.request_id.set(f"{operation.model_id}:{operation.seq_id}")
        logs.model_id.set(operation.model_id)
        try:
            outcome = await work(_Turn(self, model, operation))
        except ServiceError as error:
            outcome = error
        except Exception as error:
            if self.ends_with(error, (model.model_id, operation.seq_id)):
                return
            logger.exception("%s of %s, seq_id %d, failed", operation.kind, model.model_id, operation.seq_id)
            outcome = internal_error()
        if operation.seq_id == 0 and not operation.replayed and isinstance(outcome, ServiceError):
            self.abandon(model, ModelNotFound(f"model_id: the creation of {model.model_id!r} failed: {outcome}"))
        if model.head is operation:  # it ended without asking for a place
            _leave_head(model)
            self.advance(model)
        self.settle(model, operation, outcome)

    # Answers

    def _has_settled(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        if isinstance(outcome, ModelMoved):  # it stays in the journal as it is, and runs at the other trainer
            self._release(model, operation)
            return
        if model.restoration is not None:
            self._replay.has_settled(model, operation)
        if operation.replayed:
            self.executing.forget(model.model_id, operation.seq_id)
            self._replay.has_run_again(model, operation, outcome)
            return
        if operation.makes_model:
            self.advance(model)
        self._keep(model, operation, outcome)
        if model.restoration is not None:
            self._replay.check_load(model, operation, outcome)

    def _keep(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Logs and counts an outcome, and stores it in the background."""
        failed = isinstance(outcome, ServiceError)
        self._metrics.operations.finished.labels(operation.kind, "failed" if failed else "ok").inc()
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
        self.spawn(self._record(model, operation, outcome))

    async def _record(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Stores an answer, trying again until it succeeds, and then releases the operation.

        A restart before that would run the operation again. An answer that can never be stored is dropped, and the
        journal only has that the operation is done. A restart then runs it again to change the model, and later
        requests for its answer fail.
        """
        stored: Outcome | None = outcome
        pause_s = _STORE_AGAIN_S
        while model.restoration is None or not model.restoration.has_failed:
            try:
                async with self.executing.stage(model.model_id, operation.seq_id):
                    await self._journal.finish(
                        model.model_id, operation.seq_id, stored, keep_body=operation.changes_model
                    )
                self.executing.forget(model.model_id, operation.seq_id)
                break
            except Unstorable as error:
                logger.error("%s, seq_id %d: its answer is not kept: %s", model.model_id, operation.seq_id, error)
                stored = None
                continue
            except ServiceError as error:
                logger.warning(
                    "the result of %s, seq_id %d, is not stored yet: %s", model.model_id, operation.seq_id, error
                )
            if self._closed:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._release(model, operation)
        if operation.seq_id == 0 and model.gone and self._models.get(model.model_id) is model:
            self._models.remove(model.model_id)

    def _release(self, model: ModelQueue, operation: Operation) -> None:
        """Forgets an operation that needs nothing more."""
        model.operations.pop(operation.seq_id, None)  # one that could not be appended is gone already
        self._held.release(operation)
        operation.stored.set()
        model.used_s = time.monotonic()
        self._models.released.set()


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


def _leave_head(model: ModelQueue) -> None:
    model.head = None
    model.next_to_enter += 1


def _answer(output: Output) -> Answer:
    return Answer(forward_backward=answer_of(output))
