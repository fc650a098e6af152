"""Executes accepted operations, each in its turn, and settles them.

An operation that is executed gets a place on the compute thread, in its model's lane (packing.py). A batch gets it as
soon as the operation before it has its own. Every other operation is a coroutine that asks for its place with
`Turn.run`, at most once. Anything for which the coroutine waits before that delays only its own model. Anything after
that delays only its own result. An operation with an outcome is settled: the outcome is logged, counted and stored in
the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.errors import ModelMoved, ModelNotFound, ServiceError
from tinsmith.rpc import logs, tracing
from tinsmith.threads import in_pool
from trainer_service.durability.executing import Executing
from trainer_service.engine.batch import Batch, Output
from trainer_service.metrics import Metrics
from trainer_service.operation import Answer, Call, Operation, Outcome, Turn
from trainer_service.requests import answer_of
from trainer_service.scheduling.answer_store import AnswerStore
from trainer_service.scheduling.compute import ComputeThread, internal_error
from trainer_service.scheduling.held_bytes import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.replay import Replay
from trainer_service.scheduling.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_TOKENS = 8192
"""Results of more tokens are converted to protobuf on a thread, to keep the event loop free."""


class Execution:
    """All methods run on one event loop."""

    def __init__(
        self,
        compute: ComputeThread,
        models: ModelQueues,
        held: HeldBytes,
        answers: AnswerStore,
        executing: Executing,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self.compute = compute
        self.executing = executing
        self.replay = Replay(models, self.advance, self.abandon, compute.ends_with, held, metrics, tasks)
        self._answers = answers
        self._metrics = metrics
        self._tasks = tasks

    def advance(self, model: ModelQueue) -> None:
        """Starts the model's next operations, up to and including the first one that does not ask for its place at
        once."""
        while not (model.gone or model.head or self._tasks.is_closing):
            operation = model.operations.get(model.next_to_enter)
            if operation is None or operation.work is None:
                return
            if any(earlier.makes_model for earlier in model.unsettled):  # the model is still being made
                return
            model.head = operation
            model.unsettled.add(operation)
            if isinstance(operation.work, Batch):
                result = self._enter_batch(model, operation, operation.work)
                self._tasks.spawn(self._run_batch(model, operation, result))
            else:
                self._tasks.spawn(self._run_work(model, operation, operation.work))

    def _enter_batch(self, model: ModelQueue, operation: Operation, batch: Batch) -> asyncio.Future[Output]:
        """Gives a batch its place on the compute thread. Returns its result."""
        result: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        with (
            self.compute.dying_of_errors()
        ):  # a failed batch adds no gradients, and a lost one stops its model for ever
            self.compute.charge(batch)
            batch.alone = self.executing.is_suspect(model.model_id, operation.seq_id)
            self.enter(model, operation, result)
        return result

    def enter(self, model: ModelQueue, operation: Operation, result: asyncio.Future[Any]) -> None:
        """Gives the model's head its place on the compute thread, which will set `result`."""
        operation.result = result
        if model.gone is not None:
            result.set_exception(model.gone)
            return
        self.compute.put(operation)
        _leave_head(model)

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
        except Exception as error:  # the answer could not be made; the compute thread itself raises only ServiceError
            if self.compute.ends_with(error, (model.model_id, operation.seq_id)):
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
            if self.compute.ends_with(error, (model.model_id, operation.seq_id)):
                return
            logger.exception("%s of %s, seq_id %d, failed", operation.kind, model.model_id, operation.seq_id)
            outcome = internal_error()
        if operation.seq_id == 0 and not operation.replayed and isinstance(outcome, ServiceError):
            self.abandon(model, ModelNotFound(f"model_id: the creation of {model.model_id!r} failed: {outcome}"))
        if model.head is operation:  # the operation ended without asking for a place
            _leave_head(model)
            self.advance(model)
        self.settle(model, operation, outcome)

    def abandon(self, model: ModelQueue, error: ServiceError) -> None:
        """Fails the model's queued operations, and a running batch before its next micro-batch. A running call goes
        on."""
        model.gone = error
        if model.restoration is not None:
            model.restoration.stop_feeding()
            model.restoration.is_over.set()
        self.compute.withdraw(model.model_id, error)  # ends the operations that have a place on the compute thread
        for operation in list(model.operations.values()):
            if operation not in model.unsettled:
                self.settle(model, operation, error)

    def settle(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Sets the operation's outcome, unless it has one, and has it stored."""
        model.unsettled.discard(operation)
        if operation.outcome.done():
            return
        operation.outcome.set_result(outcome)
        if not operation.has_begun and operation.work is not None:
            self._metrics.operations.queue_length.labels(operation.kind).dec()
        if isinstance(
            outcome, ModelMoved
        ):  # the operation stays in the journal unchanged, and runs at the other trainer
            self._answers.release(model, operation)
            return
        if model.restoration is not None:
            self.replay.has_settled(model, operation)
        if operation.replayed:
            self.executing.forget(model.model_id, operation.seq_id)
            self.replay.has_run_again(model, operation, outcome)
            return
        if operation.makes_model:
            self.advance(model)
        self._answers.keep(model, operation, outcome)
        if model.restoration is not None:
            self.replay.check_load(model, operation, outcome)


@dataclass(slots=True, eq=False)
class _Turn:
    """The Turn of one operation."""

    _execution: Execution
    _model: ModelQueue
    _operation: Operation

    async def run(self, call: Callable[[], T], *, canary_tokens: int | None = None) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._operation.call = Call(self._operation, call, result, canary_tokens)
        self._execution.enter(self._model, self._operation, result)
        self._execution.advance(self._model)
        return await result

    @asynccontextmanager
    async def storing(self) -> AsyncIterator[None]:
        executing, name = self._execution.executing, (self._model.model_id, self._operation.seq_id)
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


def _leave_head(model: ModelQueue) -> None:
    model.head = None
    model.next_to_enter += 1


def _answer(output: Output) -> Answer:
    return Answer(forward_backward=answer_of(output))
