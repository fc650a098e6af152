"""The compute thread: one call of the engine at a time, of whatever is ready.

Batches that are ready, of several models or consecutive ones of one model, go to the engine in one call, up to a budget
of tokens and round robin over the models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinsmith.rpc.errors import ServiceError
from trainer_service.metrics import Metrics
from trainer_service.model_queue import Call, ModelQueue
from trainer_service.speed import Speed
from trainer_service.work import Answer, Batch, BatchEngine, Operation, Output, RunBatch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Owner(Protocol):
    """The scheduler, as the compute thread knows it."""

    def taken(self, model: ModelQueue) -> None:
        """The head of the model has its turn."""
        ...

    def settle(self, model: ModelQueue, operation: Operation, outcome: Answer | ServiceError) -> None: ...

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> object: ...


@dataclass(frozen=True, slots=True)
class Running:
    """A call of the engine that has begun."""

    operations: Sequence[Operation]
    num_tokens: int
    started_s: float
    """Of time.perf_counter."""


class ComputeThread:
    """All methods run on the event loop."""

    def __init__(self, owner: Owner, engine: BatchEngine, *, max_tokens_per_call: int, metrics: Metrics) -> None:
        self._owner = owner
        self._engine = engine
        self._max_tokens_per_call = max_tokens_per_call
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._closed = False
        self.ready: deque[ModelQueue] = deque()
        """Models with something to compute, in the order in which it came up."""
        self.running: Running | None = None
        self.speed = Speed()

    def put(self, model: ModelQueue, item: Operation | Call) -> None:
        model.ready = item
        self.ready.append(model)
        self._pump()

    def withdraw(self, model: ModelQueue) -> None:
        if model.ready is not None:
            model.ready = None
            self.ready.remove(model)

    async def run_alone(self, call: Callable[[], object]) -> None:
        """Runs what belongs to no operation, after the call that runs now."""
        await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def stop(self) -> None:
        """Starts nothing more."""
        self._closed = True
        for model in self.ready:
            if isinstance(model.ready, Call):
                model.ready.result.cancel()

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _pump(self) -> None:
        """Starts the next call, when the thread is free."""
        if self.running is not None or self._closed or not self.ready:
            return
        self.running = Running([], 0, time.perf_counter())  # what is taken now makes other works ready
        first = self.ready[0]
        if isinstance(first.ready, Call):
            call = first.ready
            self.running = Running([call.operation], 0, time.perf_counter())
            self._take(first)
            self._owner.spawn(self._run_call(call))
        else:
            works = list(self._choose_batches())
            num_tokens = sum(batch.num_tokens for _, _, batch in works)
            self.running = Running([operation for _, operation, _ in works], num_tokens, time.perf_counter())
            self._owner.spawn(self._run_batches(works))

    def _take(self, model: ModelQueue) -> None:
        self.withdraw(model)
        self._owner.taken(model)

    def _choose_batches(self) -> Iterator[tuple[ModelQueue, Operation, Batch]]:
        """Ready batches up to the budget, one of each model in turn; the first whatever its size."""
        num_tokens = 0
        turns = deque(model for model in self.ready if isinstance(model.ready, Operation))
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

    async def _run_batches(self, works: Sequence[tuple[ModelQueue, Operation, Batch]]) -> None:
        outputs = await self._on_thread(
            "forward_backward",
            lambda: self._forward_backward([(model.model_id, batch) for model, _, batch in works]),
        )
        self._metrics.batches.inc()
        self._metrics.tokens.inc(sum(batch.num_tokens for _, _, batch in works))
        answers = await asyncio.to_thread(lambda: [_answer(output) for output in outputs])
        for (model, operation, _), answer in zip(works, answers, strict=True):
            self._owner.settle(model, operation, answer)

    def _forward_backward(self, works: Sequence[tuple[str, Batch]]) -> Sequence[Output | ServiceError]:
        """On the compute thread. A failed batch leaves a gap in its model's gradients; the next step must know."""
        outputs: Sequence[Output | ServiceError]
        try:
            outputs = self._engine.forward_backward(works)
        except Exception as error:
            logger.exception("forward_backward of %s failed", ", ".join(model_id for model_id, _ in works))
            outputs = [error if isinstance(error, ServiceError) else internal_error()] * len(works)
        for (model_id, batch), output in zip(works, outputs, strict=True):
            if isinstance(output, ServiceError) and not batch.forward_only:
                self._engine.taint(model_id, output.message)
        return outputs

    async def _run_call(self, call: Call) -> None:
        try:
            result = await self._on_thread(call.operation.kind, call.run)
        except Exception as error:
            call.result.set_exception(error)
        else:
            call.result.set_result(result)

    async def _on_thread(self, kind: str, call: Callable[[], T]) -> T:
        running = self.running
        assert running is not None
        started_at = time.time()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        finally:
            seconds = time.perf_counter() - running.started_s
            self._metrics.step_seconds.labels(kind).observe(seconds)
            self.speed.observe(seconds, num_tokens=running.num_tokens)
            for operation in running.operations:
                operation.ran = started_at, time.time()
            self.running = None
            self._pump()


def _answer(output: Output | ServiceError) -> Answer | ServiceError:
    return output if isinstance(output, ServiceError) else Answer(forward_backward=output.to_proto())


def internal_error() -> ServiceError:
    return ServiceError("internal error; the trainer's log has the cause")
