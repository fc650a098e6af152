"""The scheduler of training operations. It makes three promises for each model:

1. Order: operations are executed by seq_id, without gaps, in whatever order they arrive. An early operation waits.
   operations/lost.py decides how long it waits for a seq_id that never arrives. A failed operation uses up its seq_id,
   even if validation refused it.
2. Once: a repeated (model_id, seq_id) is the same operation, running or finished. With another body it is refused.
3. One at a time: the engine gets one call at a time, on one compute thread.

An operation is accepted when it is in the journal (acceptance.py). From then on it does not depend on the call that
brought it, and survives a restart (replay.py). It is executed in its turn (execution.py), and its answer is stored
(results.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.cores import Cores
from tinsmith.rpc.errors import ModelNotFound, ResultNotFound
from tinsmith.v1.types_pb2 import QueueStatus
from trainer_service.durability.executing import Executing
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_records import Body, Entry
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation, Work
from trainer_service.scheduling.acceptance import Acceptance
from trainer_service.scheduling.compute import BatchEngine, ComputeThread, Pace
from trainer_service.scheduling.execution import Execution, Outcome
from trainer_service.scheduling.held import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.parking import Parking
from trainer_service.scheduling.queue_status import FINISHED, status_of
from trainer_service.scheduling.replay import Replay
from trainer_service.scheduling.results import Results

T = TypeVar("T")


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
        alone: bool = False,
        executing: Executing | None = None,
        cores: Cores | None = None,
    ) -> None:
        """`alone`: no two batches share a micro-batch. `executing`: the Executing of the journal's folder; made here if
        it is None. `cores`: None leaves the number of threads unchanged."""
        self._journal = journal
        self._tasks: set[asyncio.Task[Any]] = set()
        self._models = ModelQueues(metrics, max_models=max_models, max_known_models=max_known_models)
        self.parking = Parking(self._models, metrics, self.spawn)
        self._held = HeldBytes(metrics, max_bytes=max_queued_bytes)
        self.executing = Executing(journal.folder) if executing is None else executing
        self.cores = cores or Cores("", most=0, set_threads=lambda _: None)
        self._compute = ComputeThread(engine, metrics, self.executing, self.cores, alone=alone)
        self._execution = Execution(self._compute, metrics, self.executing, self.spawn, self._has_settled)
        self._acceptance = Acceptance(
            journal,
            self._models,
            self.parking,
            self._execution,
            self._held,
            metrics,
            max_queued_operations=max_queued_operations,
        )
        self._replay = Replay(self._models, self._execution, self._held, metrics, self.spawn)
        self._results = Results(journal, self._models, self._held, metrics, self.executing, self.spawn)

    @property
    def engine_died(self) -> asyncio.Event:
        """Set when nothing can be computed any more. The process must end; a restart runs the journal's operations."""
        return self._compute.engine_died

    @property
    def max_operation_bytes(self) -> int:
        """Memory of the largest operation that can ever be accepted, in bytes."""
        return self._held.max_operation_bytes

    async def accept(
        self,
        model_id: str,
        seq_id: int,
        body: Body,
        build: Callable[[], Awaitable[Work]],
        *,
        held_bytes: int | None = None,
    ) -> Operation:
        """Accepts an operation. Returns once it is in the journal; a repeat returns the first operation. Operation 0
        makes the model.

        `build`: makes the work while the journal writes. For a request that it refuses it must return work that fails.
        `held_bytes`: memory that the operation will hold, in bytes; None means that of its body. Raises ModelNotFound,
        ModelLost, SequenceConflict, OutOfCapacity, InvalidRequest for a seq_id that is too far ahead, and
        ResultNotFound for a repeat whose result has expired.
        """
        held_bytes = min(body.num_bytes, self.max_operation_bytes) if held_bytes is None else held_bytes
        return await asyncio.shield(
            self.spawn(self._acceptance.accept(model_id, seq_id, body, build, held_bytes=held_bytes))
        )

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired."""
        return await self._acceptance.find(model_id, seq_id)

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

    async def run_alone(self, call: Callable[[], T], *, canary_tokens: int | None = None) -> T:
        """Runs what belongs to no operation on the compute thread, before the next micro-batch. `canary_tokens`: see
        Turn.run."""
        return await self._compute.run_alone(call, canary_tokens=canary_tokens)

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
        model that could not be restored, and OutOfCapacity when there is no place for it in memory."""
        with self.parking.wanted(model_id):
            await self.parking.have(model_id)
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

    def leave_parked(self, model_id: str) -> None:
        """Notes a model of the journal as parked. The model is restored when a request needs it."""
        self._models.parked.add(model_id)

    def give_up(self, model_id: str, why: str) -> None:
        """Records that this process cannot restore a model. The journal keeps it for the next process."""
        self._replay.give_up(model_id, why)

    async def delete(self, model_id: str, call: Callable[[], object]) -> None:
        """Deletes a model. Its queued operations fail, and so does a batch that needs more than the current
        micro-batch.

        Waits for its other running operations, then runs `call` on the compute thread.
        """
        await self.parking.settled(model_id)
        self._models.unrestored.pop(model_id, None)
        self._models.parked.discard(model_id)
        model = self._models.remove(model_id)
        if model is not None:
            self._execution.abandon(model, ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id))
            if model.unsettled:
                await asyncio.wait([operation.outcome for operation in model.unsettled])
            await self._compute.run_alone(call)
        await self._journal.delete_model(model_id)
        self.executing.forget_model(model_id)

    async def close(self, *, timeout_s: float) -> bool:
        """Starts no further operation or micro-batch, and waits for the current work. Unfinished operations stay
        accepted in the journal.

        Returns False when something still runs after `timeout_s` seconds, or when the engine has died.
        """
        self._execution.close()
        self._results.close()
        self._replay.stop()
        deadline = time.monotonic() + timeout_s
        ended = await self._compute.close(timeout_s=timeout_s)
        while self._tasks and time.monotonic() < deadline and not self.engine_died.is_set():
            await asyncio.wait(self._tasks, timeout=deadline - time.monotonic())
        for task in self._tasks:
            task.cancel()
        return ended and not self._tasks and not self.engine_died.is_set()

    def _has_settled(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        self._replay.has_settled(model, operation)
        if operation.replayed:
            self.executing.forget(model.model_id, operation.seq_id)
            self._replay.has_run_again(model, operation, outcome)
            return
        if operation.makes_model:
            self._execution.advance(model)
        self._results.keep(model, operation, outcome)
        self._replay.check_load(model, operation, outcome)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that `close` waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
