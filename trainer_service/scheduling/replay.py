"""Runs a model's operations from the journal again, after a restart. operations/restore.py decides where they begin.

Operations with an answer keep it, and run only to change the model. The others run as if they had just arrived.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from tinsmith.errors import OutOfCapacity, ServiceError
from trainer_service.durability.executing import Name
from trainer_service.durability.records import Entry, EntryState, lost
from trainer_service.engine.batch import Batch
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation, Outcome, Work
from trainer_service.scheduling.held_bytes import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues, Restoration
from trainer_service.scheduling.tasks import Tasks

logger = logging.getLogger(__name__)


async def _unchanged(entry: Entry, work: Work) -> Work:
    return work


class Replay:
    """Feeds operations from the journal to the scheduler, and notes how the restoration of each model ends."""

    def __init__(
        self,
        models: ModelQueues,
        advance: Callable[[ModelQueue], None],
        abandon: Callable[[ModelQueue, ServiceError], None],
        ends_with: Callable[[Exception, Name], bool],
        held: HeldBytes,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        """`advance`, `abandon`, `ends_with`: those of the Execution and its compute thread."""
        self._models = models
        self._advance = advance
        self._abandon = abandon
        self._ends_with = ends_with
        self._metrics = metrics
        self._tasks = tasks
        self._started_at = time.monotonic()
        self._held = held
        self._reading = asyncio.Lock()
        """Lets one body be read at a time, because the memory of its work is known only afterwards."""
        self._num_sure = 0
        """Number of operations with an answer whose work has been made. They will run, and release their memory."""

    def begin(
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
        loop = asyncio.get_running_loop()
        known = {entry.seq_id: entry for entry in history if entry.seq_id >= start}
        known.setdefault(
            start, Entry(start, "create_model", b"", EntryState.DONE, 0)
        )  # the operation's row may have been deleted
        entries = sorted(known.values(), key=lambda entry: entry.seq_id)
        restoration = Restoration(sum(entry.state != EntryState.ACCEPTED for entry in entries), forget, unparks)
        model = self._models.add(ModelQueue(model_id, next_to_enter=start, restoration=restoration))
        for entry in entries:
            operation = model.operations[entry.seq_id] = Operation(
                model_id,
                entry.seq_id,
                entry.kind,
                entry.digest,
                accepted=loop.create_future(),
                outcome=loop.create_future(),
                makes_model=entry.seq_id == start,
                replayed=entry.state != EntryState.ACCEPTED,
            )
            operation.accepted.set_result(None)
        if not restoration.num_left:
            restoration.is_over.set()

        async def work(entry: Entry) -> Work:
            return found if entry.seq_id == start else await work_of(entry)

        restoration.feeder = loop.create_task(self._feed(model, restoration, entries, work, checked))

    def stop(self) -> None:
        """Stops reading bodies."""
        for model in self._models:
            if model.restoration is not None:
                model.restoration.stop_feeding()

    async def restored(self, model_id: str) -> None:
        """Returns when the model is restored, or has been given up and its memory freed."""
        model = self._models.get(model_id)
        if model is None or (restoration := model.restoration) is None:
            return
        await restoration.is_over.wait()
        if restoration.forgetting is not None:
            await asyncio.wait([restoration.forgetting])

    async def in_memory(self, model_id: str) -> None:
        """Returns when the model is in memory as its snapshot has it, before its later operations have run. Returns as
        `restored` does if the model is given up."""
        model = self._models.get(model_id)
        if model is None or (restoration := model.restoration) is None:
            return
        first = next((operation for operation in model.operations.values() if operation.makes_model), None)
        if first is not None:
            await asyncio.shield(first.outcome)
        if restoration.forgetting is not None:
            await asyncio.wait([restoration.forgetting])

    def give_up(self, model_id: str, why: str, *, cause: ServiceError | None = None) -> None:
        """Gives up the restoration of a model in this process. The journal keeps the model for the next process, or for
        another attempt. `cause`: the error of the operation that failed."""
        model = self._models.remove(model_id)
        error: ServiceError = lost(model_id, why)
        unparks = model is not None and model.restoration is not None and model.restoration.unparks
        if unparks and isinstance(cause, OutOfCapacity):
            error = cause  # the model will be parked again, so it is not lost
        else:
            self._models.fail_waiting(model_id, error)
            self._metrics.durability.unrestored_models.inc()
        logger.error("%s", error)
        self._models.unrestored[model_id] = error
        if model is not None and model.restoration is not None:
            model.restoration.has_failed = True
            self._abandon(model, error)
            model.restoration.is_over.set()
            model.restoration.forgetting = self._tasks.spawn(_forget(model, model.restoration))

    def has_settled(self, model: ModelQueue, operation: Operation) -> None:
        """Lets the body of a further operation be read. Called when an operation has its outcome."""
        if (restoration := model.restoration) is not None and operation.seq_id in restoration.fed:
            restoration.fed.discard(operation.seq_id)
            self._num_sure -= operation.replayed
            restoration.ahead.release()

    def has_run_again(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Counts an operation with an answer that has run again. The restoration is over after the last one, and fails
        if one fails."""
        del model.operations[operation.seq_id]
        self._held.release(operation)
        operation.stored.set()
        restoration = model.restoration
        assert restoration is not None
        if model.gone is not None:
            return
        if isinstance(outcome, ServiceError):
            self.give_up(
                model.model_id,
                f"{operation.kind}, seq_id {operation.seq_id}, fails when it runs again: {outcome}",
                cause=outcome,
            )
            return
        if not (restoration.unparks and operation.makes_model):  # reading a parked model's snapshot is no replay
            self._metrics.durability.replayed_operations.labels(operation.kind).inc()
            logger.debug("%s of %s, seq_id %d, has run again", operation.kind, model.model_id, operation.seq_id)
        if operation.makes_model:
            self._advance(model)
        restoration.num_left -= 1
        if not restoration.num_left:
            if not restoration.unparks:
                self._metrics.durability.restored_models.inc()
                self._metrics.durability.restore_seconds.observe(time.monotonic() - self._started_at)
            model.used_s = time.monotonic()
            restoration.is_over.set()
            self._models.released.set()

    def check_load(self, model: ModelQueue, operation: Operation, outcome: Outcome) -> None:
        """Gives up the model when a load without an answer fails, but later operations with answers had run after it.

        Without the loaded checkpoint those would not give the same model.
        """
        failed = operation.kind == "load_checkpoint" and isinstance(outcome, ServiceError)
        if failed and any(one.replayed and one.seq_id > operation.seq_id for one in model.operations.values()):
            self.give_up(
                model.model_id, f"a checkpoint cannot be loaded any more, but later operations have answers: {outcome}"
            )

    async def _feed(
        self,
        model: ModelQueue,
        restoration: Restoration,
        history: Sequence[Entry],
        work_of: Callable[[Entry], Awaitable[Work]],
        checked: Callable[[Entry, Work], Awaitable[Work]],
    ) -> None:
        """Makes the operations' work, only a few ahead of the one that runs, because bodies take memory."""
        for entry in history:
            await restoration.ahead.acquire()
            operation = model.operations[entry.seq_id]
            try:
                operation.work = await checked(entry, await self._read(operation, entry, work_of))
            except Exception as error:
                if self._ends_with(error, (model.model_id, entry.seq_id)):
                    return
                if not isinstance(error, ServiceError):
                    logger.exception("%s, seq_id %d, cannot be read", model.model_id, entry.seq_id)
                restoration.feeder = None
                self.give_up(model.model_id, f"seq_id {entry.seq_id} cannot be read: {error}")
                return
            restoration.fed.add(entry.seq_id)
            self._num_sure += operation.replayed
            self._metrics.operations.queue_length.labels(operation.kind).inc()
            self._advance(model)

    async def _read(self, operation: Operation, entry: Entry, work_of: Callable[[Entry], Awaitable[Work]]) -> Work:
        """Reads an operation's body and makes its work. Waits for memory while operations with answers will release
        some.

        Otherwise it does not wait: the remaining operations were accepted within the limit, and may wait for an
        operation that has not arrived, so they may release nothing.
        """
        async with self._reading:
            while self._num_sure and self._held.total >= self._held.max_bytes:
                await self._held.next_release()
            work = await work_of(entry)
            if isinstance(work, Batch):
                self._held.hold(operation, work.held_bytes)
            return work


async def _forget(model: ModelQueue, restoration: Restoration) -> None:
    if model.unsettled:
        await asyncio.wait([operation.outcome for operation in model.unsettled])
    await restoration.forget()
