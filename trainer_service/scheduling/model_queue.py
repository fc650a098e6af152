"""The models that a trainer has, and the accepted operations of each that is in memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tinsmith.errors import ModelMoved, OutOfCapacity, ServiceError
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation

_AHEAD = 16
"""Most operations of a model whose bodies are in memory before their turn, during a replay."""


@dataclass(frozen=True, slots=True)
class Gap:
    """An operation that has not arrived, and for which others of its model wait."""

    model_id: str
    seq_id: int
    """seq_id of the missing operation."""
    behind: frozenset[int]
    """seq_ids of the operations that wait for it."""


@dataclass(slots=True, eq=False)
class Restoration:
    """The restoration of a model, after a restart or after it was parked."""

    num_left: int
    """Number of operations that were answered before, and have not run again yet."""
    forget: Callable[[], Awaitable[object]]
    """Frees the model's memory."""
    unparks: bool = False
    """True when the model was parked, by this process or by the one before."""
    feeder: asyncio.Task[None] | None = None
    """Task that reads the operations' bodies and makes their work."""
    ahead: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AHEAD))
    """Limits the number of operations in `fed`."""
    fed: set[int] = field(default_factory=set)
    """seq_ids of the operations that have work and no result yet."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False
    """True when the model could not be restored. Its operations stay unchanged in the journal, for another attempt."""
    forgetting: asyncio.Task[None] | None = None
    """Task that frees the rest of the model after a failure."""

    def stop_feeding(self) -> None:
        if self.feeder is not None:
            self.feeder.cancel()


@dataclass(slots=True, eq=False)
class ModelQueue:
    """The accepted operations of one model."""

    model_id: str
    next_to_enter: int = 0
    """seq_id of the first operation without a place on the compute thread."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """Operations whose results are not in the journal yet, by seq_id."""
    head: Operation | None = None
    """The operation that has started but has no place on the compute thread yet: it may read a checkpoint first."""
    unsettled: set[Operation] = field(default_factory=set)
    """Operations that have started and have no result."""
    gone: ServiceError | None = None
    """Error of the model's remaining operations; set when the model was deleted or given up."""
    restoration: Restoration | None = None
    """The restoration of a model from before a restart or from being parked; None for a model made by this process."""
    used_s: float = field(default_factory=time.monotonic)
    """Time at which the last operation came or was answered, by time.monotonic."""
    stays_until_s: float = 0.0
    """Time before which the model is not parked, after an attempt that failed, by time.monotonic."""

    @property
    def is_idle(self) -> bool:
        """True when everything that was asked of the model is done, and the answers are stored."""
        return not (self.operations or self.unsettled or self.gone is not None or self.is_being_restored)

    @property
    def waits_for_missing(self) -> bool:
        """True when operations are left, and all of them wait for one that has not arrived."""
        if not self.operations or self.unsettled or self.gone is not None or self.is_being_restored:
            return False
        is_missing = min(self.operations) > self.next_to_enter
        return is_missing and not any(operation.is_arriving for operation in self.operations.values())

    @property
    def is_being_restored(self) -> bool:
        """True until the restoration has succeeded or failed."""
        return self.restoration is not None and not self.restoration.is_over.is_set()

    @property
    def next_seq_id(self) -> int:
        """seq_id of the first operation that has neither begun nor failed, whether it has arrived or not."""
        seq_id = self.next_to_enter
        while (before := self.operations.get(seq_id - 1)) is not None and _waits(before):
            seq_id -= 1
        while (following := self.operations.get(seq_id)) is not None and following.replayed:
            seq_id += 1
        return seq_id

    @property
    def num_queued(self) -> int:
        """Number of accepted operations that have not begun."""
        return sum(map(_waits, self.operations.values()))

    def has_settled_before(self, seq_id: int) -> bool:
        """True when every operation before this one has its outcome."""
        return all(one.outcome.done() for one in self.operations.values() if one.seq_id < seq_id)

    def in_turn(self) -> Iterator[Operation]:
        """The operations without a place on the compute thread, in order, up to the first that has not arrived."""
        seq_id = self.next_to_enter
        while (operation := self.operations.get(seq_id)) is not None:
            yield operation
            seq_id += 1


class ModelQueues:
    """Queues of the live models in memory, by model_id, and the ids of the other models."""

    def __init__(self, metrics: Metrics, *, max_models: int, max_known_models: int) -> None:
        self._queues: dict[str, ModelQueue] = {}
        self._metrics = metrics
        self.max_models = max_models
        self._max_known_models = max_known_models
        self.unrestored: dict[str, ServiceError] = {}
        """Errors of the models that this process could not restore, by model_id."""
        self.moved: dict[str, ModelMoved] = {}
        """Errors of the models that were released for another trainer, or are being released, by model_id."""
        self.parked: set[str] = set()
        """Ids of live models that are on disk only (parking.py)."""
        self.waiting: dict[str, ModelQueue] = {}
        """Queues of the parked models with operations, which all wait for one that has not arrived, by model_id. The
        operations are in the journal, and have no work in memory."""
        self.coming: set[str] = set()
        """Ids of models that are being brought back into memory. Each has its place in memory already."""
        self.transitions: dict[str, asyncio.Task[Any]] = {}
        """Tasks that park or unpark a model, by model_id."""
        self._wanted: Counter[str] = Counter()
        """Number of calls that are about to use a model, by model_id."""
        self.released = asyncio.Event()
        """Set whenever a model may have become idle, or has gone. A task that waits for a place clears it."""
        metrics.memory.parked_models.set_function(lambda: len(self.parked))

    def __len__(self) -> int:
        """Number of models in memory or on their way there."""
        return len(self._queues) + sum(model_id not in self._queues for model_id in self.coming)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.max_models

    @property
    def num_known(self) -> int:
        """Number of live models, in memory or parked."""
        return len(self) + len(self.parked)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._queues

    def __iter__(self) -> Iterator[ModelQueue]:
        return iter(self._queues.values())

    def __getitem__(self, model_id: str) -> ModelQueue:
        return self._queues[model_id]

    def get(self, model_id: str) -> ModelQueue | None:
        return self._queues.get(model_id)

    def get_queue(self, model_id: str) -> ModelQueue | None:
        """The queue of a model that is in memory, or is parked with operations."""
        return self.waiting.get(model_id) or self._queues.get(model_id)

    def is_away(self, model_id: str) -> bool:
        """True for a model that is parked, or is being parked or brought back."""
        return model_id in self.transitions or model_id in self.parked

    def is_known(self, model_id: str) -> bool:
        """True for a model in memory, parked, or on its way between the two, and for one that was given up."""
        return model_id in self or self.is_away(model_id) or model_id in self.unrestored

    def is_queued(self, model_id: str, seq_id: int) -> bool:
        """False for an operation whose model was deleted."""
        model = self.get_queue(model_id)
        return model is not None and seq_id in model.operations

    def gaps(self) -> list[Gap]:
        """The missing operations, one of each model whose accepted operations all wait for one that has not arrived."""
        return [
            Gap(model.model_id, model.next_to_enter, behind)
            for model in (*self, *self.waiting.values())
            if not model.is_being_restored
            and model.next_to_enter not in model.operations
            and (behind := frozenset(seq_id for seq_id in model.operations if seq_id > model.next_to_enter))
        ]

    def check_not_moved(self, model_id: str) -> None:
        """Raises ModelMoved."""
        if (error := self.moved.get(model_id)) is not None:
            raise error

    def forget_moved(self, model_id: str, move_id: str) -> None:
        """Forgets a model that was released in this move. Calls for the model fail with ModelNotFound from now on."""
        if (error := self.moved.get(model_id)) is not None and error.metadata.get("move_id") == move_id:
            del self.moved[model_id]

    def fail_waiting(self, model_id: str, error: ServiceError) -> None:
        """Fails the operations of a parked model. In the journal they stay as they are."""
        if (model := self.waiting.pop(model_id, None)) is not None:
            for operation in model.operations.values():
                operation.outcome.set_result(error)

    @contextmanager
    def wanted(self, model_id: str) -> Iterator[None]:
        """Keeps a model from being parked within the context."""
        self._wanted[model_id] += 1
        try:
            yield
        finally:
            self._wanted[model_id] -= 1
            if not self._wanted[model_id]:
                del self._wanted[model_id]
                self.released.set()

    def is_wanted(self, model_id: str) -> bool:
        return model_id in self._wanted

    def open(self, model_id: str) -> ModelQueue:
        """Makes the queue of a new model, for which there is a place in memory. Raises OutOfCapacity when there are
        max_known_models already."""
        if (num_known := self.num_known) >= self._max_known_models:
            raise OutOfCapacity(
                f"{num_known} models are live, in memory or parked, this server's max_known_models "
                f"({self._max_known_models}); close a session that is done"
            )
        return self.add(ModelQueue(model_id))

    def add(self, model: ModelQueue) -> ModelQueue:
        """Adds a queue, even beyond max_models: the model may have been in memory before a restart."""
        self._queues[model.model_id] = model
        self._metrics.memory.models.set(len(self._queues))
        return model

    def remove(self, model_id: str) -> ModelQueue | None:
        model = self._queues.pop(model_id, None)
        self._metrics.memory.models.set(len(self._queues))
        self.released.set()
        return model


def _waits(operation: Operation) -> bool:
    return not operation.has_begun and not operation.replayed and not operation.outcome.done()
