"""The order of training operations. Three promises, for each model:

1. Order: operations are executed by seq_id, without gaps, whatever order they arrive in. One that comes early waits; a
   seq_id that never comes is no error. A failed operation, also one that validation refused, uses up its seq_id.
2. Once: the same (model_id, seq_id) again is the same operation, running or finished; with another body it is refused.
3. One at a time: the engine sees one call at a time, on one compute thread.

An operation is accepted when it is in the journal. From then on it lives here, whatever becomes of the call that
brought it.

Batches that are ready, of several models or consecutive ones of one model, go to the engine in one call, up to a budget
of tokens and round robin over the models. Every other operation is a coroutine that takes its turn on the compute
thread, at most once, with `Turn.run`. What it awaits before delays its own model only. What it awaits after delays only
its own result: the model goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinsmith.rpc import logs
from tinsmith.rpc.errors import ModelNotFound, OutOfCapacity, ResultNotFound, SequenceConflict, ServiceError
from trainer_service.journal import Body, Journal
from trainer_service.metrics import Metrics
from trainer_service.work import Answer, Batch, BatchEngine, Operation, Output, RunBatch, Turn, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Call:
    """What the coroutine of an operation wants from the compute thread."""

    operation: Operation
    run: Callable[[], Any]
    result: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Model:
    model_id: str
    next_seq_id: int = 0
    operations: dict[int, Operation] = field(default_factory=dict)
    """Those whose results are not in the journal yet."""
    head: Operation | None = None
    """The operation that has started and not yet had its turn on the compute thread."""
    ready: Operation | _Call | None = None
    """What of it waits for the compute thread: a batch, or a coroutine's call."""
    unsettled: set[Operation] = field(default_factory=set)
    """Started operations without a result."""
    gone: ServiceError | None = None
    """Why nothing of this model runs any more."""

    @property
    def queued(self) -> list[Operation]:
        return [operation for seq_id, operation in self.operations.items() if seq_id >= self.next_seq_id]


@dataclass(slots=True, eq=False)
class _Turn:
    """The Turn that an operation is given."""

    _scheduler: Scheduler
    _model: _Model
    _operation: Operation

    async def run(self, call: Callable[[], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._scheduler._enqueue(self._model, _Call(self._operation, call, result))
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
        self._engine = engine
        self._journal = journal
        self._max_tokens_per_call = max_tokens_per_call
        self._max_queued_operations = max_queued_operations
        self._max_models = max_models
        self._metrics = metrics
        self._models: dict[str, _Model] = {}
        self._ready: deque[_Model] = deque()
        """Models with something for the compute thread, in the order in which it came up."""
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._computing = False
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def accept(self, model_id: str, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]]) -> Operation:
        """Returns once the operation is in the journal; a repeat returns the first one. Operation 0 makes the model.

        `build` makes the work while the journal writes; what it refuses must be a work that fails. Raises
        ModelNotFound, ModelLost, SequenceConflict, ResultNotFound (a repeat whose result has expired), OutOfCapacity.
        """
        return await asyncio.shield(self._spawn(self._accept(model_id, seq_id, body, build)))

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired."""
        model = self._models.get(model_id)
        if model is not None and seq_id in model.operations:
            return await _accepted(model.operations[seq_id])
        operation = await self._stored(model_id, seq_id)
        if operation is None:
            raise ResultNotFound(f"{model_id}: no operation with seq_id {seq_id} was accepted")
        return operation

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
            await asyncio.get_running_loop().run_in_executor(self._compute, call)
        await self._journal.delete_model(model_id)

    async def close(self, *, timeout_s: float) -> bool:
        """Starts nothing more and waits for what runs. What is queued stays accepted in the journal.

        Returns False when something still ran after `timeout_s` seconds.
        """
        self._closed = True
        for model in self._ready:
            if isinstance(model.ready, _Call):
                model.ready.result.cancel()
        deadline = time.monotonic() + timeout_s
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - time.monotonic())
        self._compute.shutdown(wait=False, cancel_futures=True)
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

    def _new_model(self, model_id: str) -> _Model:
        if len(self._models) >= self._max_models:
            raise OutOfCapacity(
                f"{len(self._models)} models are live, this server's max_models; close a session that is done"
            )
        model = self._models[model_id] = _Model(model_id)
        self._metrics.models.set(len(self._models))
        return model

    async def _append(self, model: _Model, seq_id: int, body: Body, build: Callable[[], Awaitable[Work]]) -> Operation:
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

    def _advance(self, model: _Model) -> None:
        """Starts the model's next operation, if it is here and the one before has had its turn."""
        operation = model.operations.get(model.next_seq_id)
        if model.gone or model.head is not None or operation is None or operation.work is None or self._closed:
            return
        if any(earlier.seq_id == 0 for earlier in model.unsettled):  # the model does not exist yet
            return
        model.head = operation
        model.unsettled.add(operation)
        if isinstance(operation.work, RunBatch):
            model.ready = operation
            self._ready.append(model)
            self._pump()
        else:
            self._spawn(self._run_work(model, operation, operation.work))

    def _enqueue(self, model: _Model, call: _Call) -> None:
        if model.gone is not None:
            call.result.set_exception(model.gone)
        elif self._closed:
            call.result.cancel()
        else:
            model.ready = call
            self._ready.append(model)
            self._pump()

    def _pump(self) -> None:
        """Gives the compute thread its next call, when it is free."""
        if self._computing or self._closed or not self._ready:
            return
        self._computing = True
        first = self._ready[0].ready
        if isinstance(first, _Call):
            self._take(self._ready[0])
            self._spawn(self._run_call(first))
        else:
            self._spawn(self._run_batches(list(self._take_batches())))

    def _take_batches(self) -> Iterator[tuple[_Model, Operation, Batch]]:
        """Ready batches up to the budget, one of each model in turn; the first whatever its size."""
        num_tokens = 0
        turns = deque(model for model in self._ready if isinstance(model.ready, Operation))
        while turns:
            model = turns.popleft()
            operation = model.ready
            if not isinstance(operation, Operation) or not isinstance(operation.work, RunBatch):
                continue
            batch = operation.work.batch
            if num_tokens and num_tokens + batch.num_tokens > self._max_tokens_per_call:
                continue
            num_tokens += batch.num_tokens
            self._take(model)
            turns.append(model)
            yield model, operation, batch

    def _take(self, model: _Model) -> None:
        """The head of the model has its turn; the next operation may start."""
        if model.ready is not None:
            model.ready = None
            self._ready.remove(model)
        if (operation := model.head) is not None:
            model.head = None
            model.next_seq_id += 1
            self._metrics.queue_length.labels(operation.kind).dec()
            self._metrics.queue_seconds.labels(operation.kind).observe(time.perf_counter() - operation.arrived_s)
        self._advance(model)

    async def _run_batches(self, works: Sequence[tuple[_Model, Operation, Batch]]) -> None:
        outputs = await self._on_compute_thread(
            "forward_backward",
            lambda: self._forward_backward([(model.model_id, batch) for model, _, batch in works]),
        )
        self._metrics.batches.inc()
        self._metrics.tokens.inc(sum(batch.num_tokens for _, _, batch in works))
        answers = await asyncio.to_thread(lambda: [_answer(output) for output in outputs])
        for (model, operation, _), answer in zip(works, answers, strict=True):
            self._settle(model, operation, answer)

    def _forward_backward(self, works: Sequence[tuple[str, Batch]]) -> Sequence[Output | ServiceError]:
        """On the compute thread. A failed batch leaves a gap in its model's gradients; the next step must know."""
        outputs: Sequence[Output | ServiceError]
        try:
            outputs = self._engine.forward_backward(works)
        except Exception as error:
            logger.exception("forward_backward of %s failed", ", ".join(model_id for model_id, _ in works))
            outputs = [error if isinstance(error, ServiceError) else _internal_error()] * len(works)
        for (model_id, batch), output in zip(works, outputs, strict=True):
            if isinstance(output, ServiceError) and not batch.forward_only:
                self._engine.taint(model_id, output.message)
        return outputs

    async def _run_call(self, call: _Call) -> None:
        try:
            result = await self._on_compute_thread(call.operation.kind, call.run)
        except Exception as error:
            call.result.set_exception(error)
        else:
            call.result.set_result(result)

    async def _on_compute_thread(self, kind: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compute, call)
        finally:
            self._metrics.step_seconds.labels(kind).observe(time.perf_counter() - started)
            self._computing = False
            self._pump()

    async def _run_work(
        self, model: _Model, operation: Operation, work: Callable[[Turn], Coroutine[Any, Any, Answer]]
    ) -> None:
        outcome: Answer | ServiceError
        try:
            outcome = await work(_Turn(self, model, operation))
        except ServiceError as error:
            outcome = error
        except Exception:
            logger.exception("%s of %s, seq_id %d, failed", operation.kind, model.model_id, operation.seq_id)
            outcome = _internal_error()
        if operation.seq_id == 0 and isinstance(outcome, ServiceError):
            self._abandon(model, ModelNotFound(f"model_id: the creation of {model.model_id!r} failed: {outcome}"))
        if model.head is operation:
            self._take(model)
        self._settle(model, operation, outcome)

    def _settle(self, model: _Model, operation: Operation, outcome: Answer | ServiceError) -> None:
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
        self._spawn(self._record(model, operation, outcome))

    async def _record(self, model: _Model, operation: Operation, outcome: Answer | ServiceError) -> None:
        try:
            await self._journal.finish(model.model_id, operation.seq_id, outcome)
        except ServiceError:
            logger.exception("the result of %s, seq_id %d, is not stored", model.model_id, operation.seq_id)
        del model.operations[operation.seq_id]
        if operation.seq_id == 0 and model.gone and self._models.get(model.model_id) is model:
            del self._models[model.model_id]
            self._metrics.models.set(len(self._models))

    def _abandon(self, model: _Model, error: ServiceError) -> None:
        """Fails what is queued; what runs goes on."""
        model.gone = error
        if model.ready is not None:
            self._ready.remove(model)
        if isinstance(model.ready, _Call):
            model.ready.result.set_exception(error)  # its coroutine ends by this
        elif model.ready is not None:
            model.head = None
        model.ready = None
        for operation in model.queued:
            if operation is not model.head:
                if operation.work is not None:
                    self._metrics.queue_length.labels(operation.kind).dec()
                self._settle(model, operation, error)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
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


def _answer(output: Output | ServiceError) -> Answer | ServiceError:
    return output if isinstance(output, ServiceError) else Answer(forward_backward=output.to_proto())


def _internal_error() -> ServiceError:
    return ServiceError("internal error; the trainer's log has the cause")
