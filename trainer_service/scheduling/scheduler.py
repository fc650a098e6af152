"""The order of training operations. Three promises, for each model:

1. Order: operations are executed by seq_id, without gaps, whatever order they arrive in. One that comes early waits;
   for how long, where a seq_id never comes, is decided elsewhere (operations/lost.py). A failed operation, also one
   that validation refused, uses up its seq_id.
2. Once: the same (model_id, seq_id) again is the same operation, running or finished; with another body it is refused.
3. One at a time: the engine sees one call at a time, on one compute thread.

An operation is accepted when it is in the journal (acceptance.py). From then on it lives here, whatever becomes of the
call that brought it, and also after a restart (replay.py). It is executed in its turn (execution.py), and its answer is
stored (results.py).
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
from trainer_service.scheduling.acceptance import Acceptance
from trainer_service.scheduling.compute import ComputeThread, Pace
from trainer_service.scheduling.execution import Execution, Outcome
from trainer_service.scheduling.held import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.parking import Parking
from trainer_service.scheduling.queue_status import FINISHED, status_of
from trainer_service.scheduling.replay import Replay
from trainer_service.scheduling.results import Results
from trainer_service.scheduling.work import BatchEngine, Operation, Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gap:
    model_id: str
    seq_id: int
    """Has not arrived."""
    behind: frozenset[int]
    """Those that have, and wait for it."""


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
        """`alone`: no two batches share a micro-batch. `executing`: that of the journal's folder; made
        here unless given. `cores`: None leaves the number of threads as it is."""
        self._journal = journal
        self._tasks: set[asyncio.Task[Any]] = set()
        self._models = ModelQueues(metrics, max_models=max_models, max_known_models=max_known_models)
        self.parking = Parking(self._models, metrics, self.spawn)
        self._held = HeldBytes(metrics, max_bytes=max_queued_bytes)
        self.executing = Executing(journal.folder) if executing is None else executing
        self._compute = ComputeThread(
            engine, metrics, self.executing, cores or Cores("", most=0, set_threads=lambda _: None), alone=alone
        )
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
        """Nothing is computed any more. The process is to end: what is in the journal runs again after a restart."""
        return self._compute.engine_died

    @property
    def max_operation_bytes(self) -> int:
        """Memory of the largest operation that can be taken at all."""
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
        """Returns once the operation is in the journal; a repeat returns the first one. Operation 0 makes the model.

        `build` makes the work while the journal writes; what it refuses must be a work that fails. `held_bytes`:
        memory that the operation will hold, when that is more than its body. Raises
        ModelNotFound, ModelLost, SequenceConflict, ResultNotFound (a repeat whose result has expired), OutOfCapacity.
        """
        held_bytes = min(body.num_bytes, self.max_operation_bytes) if held_bytes is None else held_bytes
        return await asyncio.shield(
            self.spawn(self._acceptance.accept(model_id, seq_id, body, build, held_bytes=held_bytes))
        )

    async def find(self, model_id: str, seq_id: int) -> Operation:
        """An accepted operation. Raises ResultNotFound when there is none, or its result has expired."""
        return await self._acceptance.find(model_id, seq_id)

    async def describe(self, model_id: str, seq_id: int) -> QueueStatus:
        """What an accepted operation waits for. Raises ResultNotFound when there is none, or its result has expired."""
        operation = await self.find(model_id, seq_id)
        model = self._models.get(model_id)
        if model is not None and model.operations.get(seq_id) is operation:
            return status_of(operation, model, backlog=self._compute.backlog(), speed=self._compute.speed)
        if isinstance(outcome := operation.outcome.result(), ResultNotFound):
            raise outcome
        return FINISHED

    def pace(self) -> Pace:
        return self._compute.pace()

    async def run_alone(self, call: Callable[[], T], *, pass_tokens: int | None = None) -> T:
        """Runs what belongs to no operation on the compute thread, before the next micro-batch. `pass_tokens`: tokens
        that it puts through the base model; None for a call of another kind."""
        return await self._compute.run_alone(call, pass_tokens=pass_tokens)

    def gaps(self) -> list[Gap]:
        """Of the models whose accepted operations all wait for one that has not arrived."""
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
        """Waits while the model is being made or restored, and brings it back if it is parked. Raises ModelLost for one
        that could not be restored, OutOfCapacity when there is no place for it."""
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
        """Brings a model back from the journal: `found` makes it as it was after operation `start`, or runs operation
        0 again, and the later ones follow. Those that had an answer keep it, and `work_of` makes what they do again.
        `checked` is asked for each work that `work_of` has made, may take long, and gives what runs.

        When one of those fails that had not, the model is given up, and `forget` frees what there is of it.
        `unparks`: the model was parked.
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
        """Returns when a model that `restore` brings back is there, or has been given up and is forgotten."""
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
        """The model cannot be restored by this process; the journal keeps it for another."""
        self._replay.give_up(model_id, why)

    async def delete(self, model_id: str, call: Callable[[], object]) -> None:
        """Forgets a model: what is queued fails, and so does a batch that is not through when this micro-batch ends.

        What else runs is waited for, then `call` runs on the compute thread.
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
        """Starts nothing more, no micro-batch either, and waits for what runs.

        What is not through then stays accepted in the journal.
        Returns False when something still ran after `timeout_s` seconds, or when the engine has died.
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
        if operation.founds:
            self._execution.advance(model)
        self._results.keep(model, operation, outcome)
        self._replay.check_load(model, operation, outcome)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
