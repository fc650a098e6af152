"""Parking of live models: a parked model is on disk, and only its id is in memory.

A model is parked when it has had no work for a while, or when another model needs its place and it was used longest
ago. A parked model comes back when a request needs it. Only a model without work is parked: all its accepted operations
are answered, the answers are stored, and no call is about to use it.

A model whose accepted operations all wait for one that has not arrived has no work, either: its client may have died
while it sent them. Its operations stay in the journal, and their callers go on waiting for them
(`ModelQueues.waiting`). The next new operation brings it back, and its operations are read from the journal.

A parked model is in the same state as a model after the end of the trainer: it has a snapshot that covers its last
operation. So a trainer that is killed while it parks a model finds the model unchanged, and a trainer that starts
leaves all covered models parked (operations/restore.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from tinsmith.errors import NotReady, OutOfCapacity, ServiceError
from tinsmith.tasks import set_within
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation, Outcome
from trainer_service.scheduling.held_bytes import HeldBytes
from trainer_service.scheduling.model_queue import ModelQueue, ModelQueues
from trainer_service.scheduling.tasks import Tasks

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""Longest wait of a model for a place in memory while all other models have work, in seconds."""
_TRY_AGAIN_S = 30.0
"""Time after which parking a model is tried again when it has failed, in seconds."""
_BRING_BACK_AGAIN_S = 1.0
"""Pause between two attempts to bring back a model that has work, in seconds."""
_LOOKS = 10
"""Number of searches for idle models within the time after which they are parked."""
_LONGEST_PAUSE_S = 30.0
"""Longest pause between two searches, in seconds."""
_MISSING_S = 2.0
"""Time since a model's newest operation after which it may be parked although its operations wait for one that has not
arrived, in seconds. The operations of a living client arrive in any order, but within this time."""
_LOOK_AGAIN_S = 0.5
"""Pause between two attempts to park a model for the sake of another, while none becomes idle, in seconds."""


class Shelf(Protocol):
    """Storage of parked models."""

    async def put_away(self, model_id: str, seq_id: int) -> None:
        """Stores the model, as it is after its last operation `seq_id`, and frees its memory.

        Raises OSError and ServiceError when that fails; the model then stays in memory.
        """
        ...

    async def bring_back(self, model_id: str) -> None:
        """Restores the model. Returns, too, when the model has been given up or lost.

        Raises OSError and ServiceError when another attempt may succeed.
        """
        ...


class Parking:
    """Parks and unparks models. All methods run on one event loop."""

    def __init__(self, models: ModelQueues, held: HeldBytes, metrics: Metrics, tasks: Tasks) -> None:
        self.shelf: Shelf | None = None
        """Storage of parked models; None means that no model is parked."""
        self._models = models
        self._held = held
        self._metrics = metrics
        self._tasks = tasks
        self._door = asyncio.Lock()
        """Held while a place is made, so that places are given in the order of the requests."""

    async def run(self, *, idle_s: float) -> None:
        """Parks models that have had no work for `idle_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(min(idle_s / _LOOKS, _LONGEST_PAUSE_S))
            await self.park_idle(idle_s)

    async def park_idle(self, idle_s: float) -> None:
        """Parks each model that has had no work for `idle_s` seconds."""
        for model in list(self._models):
            if time.monotonic() - model.used_s >= idle_s and self._may_go(model):
                await self._park(model)

    async def settled(self, model_id: str) -> None:
        """Returns when the model is not being parked or unparked."""
        while (transition := self._models.transitions.get(model_id)) is not None:
            await asyncio.wait([transition])

    async def have(self, model_id: str) -> None:
        """Brings the model back if it is parked. Called within `ModelQueues.wanted`. Raises OutOfCapacity when there is
        no place for the model in memory, and other errors when it cannot be restored now."""
        while (transition := self._models.transitions.get(model_id)) is not None or model_id in self._models.parked:
            if transition is None:
                transition = self._begin(model_id, self._unpark(model_id))
            await asyncio.shield(transition)

    def begin_to_have(self, *model_ids: str) -> None:
        """Brings parked models back, in the background and one after the other, because they have operations that have
        not run. Tries again while there is no place for one."""

        async def have(model_id: str) -> None:
            while not self._tasks.is_closing:
                try:
                    with self._models.wanted(model_id):
                        return await self.have(model_id)
                except (OutOfCapacity, NotReady) as error:
                    logger.warning("%s waits for its place in memory: %s", model_id, error)
                await asyncio.sleep(_BRING_BACK_AGAIN_S)

        async def have_each() -> None:
            for model_id in model_ids:
                await have(model_id)

        self._tasks.spawn(have_each())

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A context in which there is a place for one more model in memory. Parks a model if needed. Raises
        OutOfCapacity."""
        deadline = time.monotonic() + _PATIENCE_S
        async with self._door:
            await self._park_until(lambda: not self._models.is_full, deadline=deadline)
            if self._models.is_full:
                raise OutOfCapacity(
                    f"{len(self._models)} models are in memory, this server's max_models, and none of them can be "
                    "parked at this moment: they have work, or their disk is full; try again"
                )
            yield

    async def make_room(self, suffices: Callable[[], bool]) -> None:
        """Parks models until `suffices()` is true. Gives up when no model can be parked for some seconds."""
        await self._park_until(suffices, deadline=time.monotonic() + _PATIENCE_S)

    async def _park_until(self, suffices: Callable[[], bool], *, deadline: float) -> None:
        while not suffices():
            self._models.released.clear()
            if await self._park_one():
                continue
            left = deadline - time.monotonic()
            if left <= 0 or self.shelf is None:
                return
            await set_within(self._models.released, min(left, _LOOK_AGAIN_S))

    async def _park_one(self) -> bool:
        """Parks the model that was used longest ago, of those without operations if there is one. Returns False when no
        model could be parked."""
        for model in sorted(filter(self._may_go, self._models), key=lambda model: (not model.is_idle, model.used_s)):
            if self._may_go(model) and await self._park(model):
                return True
        return False

    def _may_go(self, model: ModelQueue) -> bool:
        now_s = time.monotonic()
        has_no_work = model.is_idle or (model.waits_for_missing and now_s - model.used_s >= _MISSING_S)
        if self.shelf is None or not has_no_work or self._models.get(model.model_id) is not model:
            return False
        is_used = self._models.is_wanted(model.model_id) or model.model_id in self._models.transitions
        return not is_used and now_s >= model.stays_until_s

    async def _park(self, model: ModelQueue) -> bool:
        return await asyncio.shield(self._begin(model.model_id, self._put_away(model)))

    def _begin(self, model_id: str, transition: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        async def running() -> Any:
            try:
                return await transition
            finally:
                # Not in a callback of the task: until it ran, whoever awaits the finished task would spin.
                del self._models.transitions[model_id]

        task = self._models.transitions[model_id] = self._tasks.spawn(running())
        return task

    async def _put_away(self, model: ModelQueue) -> bool:
        assert self.shelf is not None
        started = time.perf_counter()
        try:
            await self.shelf.put_away(model.model_id, model.next_seq_id - 1)
        except Exception as error:
            unexpected = not isinstance(error, ServiceError | OSError | MemoryError)
            logger.warning("%s is not parked: %s", model.model_id, error, exc_info=unexpected)
            model.stays_until_s = time.monotonic() + _TRY_AGAIN_S
            return False
        self._models.parked.add(model.model_id)
        self._models.remove(model.model_id)
        if model.operations:
            self._set_aside(model)
        self._metrics.memory.park_seconds.observe(time.perf_counter() - started)
        logger.info("%s is parked", model.model_id)
        return True

    def _set_aside(self, model: ModelQueue) -> None:
        """Frees the work of the operations of a parked model. Their callers go on waiting, and their memory stays
        counted, because many models may come back at once."""
        if model.restoration is not None:
            model.restoration.stop_feeding()
        for operation in model.operations.values():
            if operation.work is not None:
                self._metrics.operations.queue_length.labels(operation.kind).dec()
                operation.work = None
            operation.outcome.add_done_callback(lambda _, operation=operation: self._held.release(operation))
        self._models.waiting[model.model_id] = model

    def _hand_over(self, model: ModelQueue) -> None:
        """Gives the operations of a model that has come back the callers of those that were set aside, and the memory
        that is counted for them until their bodies are read."""
        if (before := self._models.waiting.pop(model.model_id, None)) is not None:
            for seq_id, waiting in before.operations.items():
                operation = model.operations[seq_id]
                if not operation.held_bytes:
                    self._held.hold(operation, waiting.held_bytes)
                self._held.release(waiting)
                _answers(operation, waiting)

    async def _unpark(self, model_id: str) -> None:
        assert self.shelf is not None
        started = time.perf_counter()
        async with self.place():
            self._models.parked.remove(model_id)
            self._models.coming.add(model_id)
        try:
            await self.shelf.bring_back(model_id)
            if isinstance(error := self._models.unrestored.get(model_id), OutOfCapacity):
                del self._models.unrestored[model_id]
                raise error
        except BaseException:  # the model is still on disk, and the next call for it tries again
            self._models.parked.add(model_id)
            raise
        finally:
            self._models.coming.remove(model_id)
            self._models.released.set()
        if (model := self._models.get(model_id)) is None:
            return
        self._hand_over(model)
        model.used_s = time.monotonic()
        self._metrics.memory.unpark_seconds.observe(time.perf_counter() - started)
        logger.info("%s is in memory again", model_id)


def _answers(operation: Operation, waiting: Operation) -> None:
    """Lets `waiting`, which was set aside, have the outcome of the same operation as read from the journal."""

    def answered(outcome: asyncio.Future[Outcome]) -> None:
        waiting.ran = operation.ran
        waiting.outcome.set_result(outcome.result())

    operation.outcome.add_done_callback(answered)
