"""A model's accepted operations, and where it stands in them; and all live models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from tinsmith.rpc.errors import OutOfCapacity, ServiceError
from trainer_service.metrics import Metrics
from trainer_service.scheduling.work import Operation

_AHEAD = 16
"""Operations of a model whose bodies are read before their turn in a replay."""


@dataclass(slots=True, eq=False)
class Restoration:
    """How a model comes back, after a restart or from being parked."""

    num_left: int
    """Operations that had run before, and have not run again."""
    forget: Callable[[], Awaitable[object]]
    """Frees what there is of the model."""
    unparks: bool = False
    """True when the model was parked, by this process or by the one before."""
    feeder: asyncio.Task[None] | None = None
    """Gives the operations their works."""
    ahead: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AHEAD))
    fed: set[int] = field(default_factory=set)
    """seq_ids of those that have works and no result: as many as `ahead` allows."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False
    """The model could not be restored: its operations stay in the journal as they are, for another try."""
    forgetting: asyncio.Task[None] | None = None
    """Task that frees the rest of the model after a failure."""


@dataclass(slots=True, eq=False)
class ModelQueue:
    model_id: str
    next_to_enter: int = 0
    """seq_id of the first operation that has not got its place on the compute thread."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """Those whose results are not in the journal yet."""
    head: Operation | None = None
    """The operation that has started and has not got its place yet: it reads a checkpoint, for example."""
    unsettled: set[Operation] = field(default_factory=set)
    """Started operations without a result."""
    gone: ServiceError | None = None
    """Why nothing of this model runs any more."""
    restoration: Restoration | None = None
    """How the model came back, if it is from before a restart or was parked."""
    used_s: float = field(default_factory=time.monotonic)
    """Time at which the last operation came or was answered, by time.monotonic."""
    stays_until_s: float = 0.0
    """Time before which the model is not parked, after an attempt that failed, by time.monotonic."""

    @property
    def is_idle(self) -> bool:
        """True when everything that was asked of the model is done, and the answers are stored."""
        if self.operations or self.unsettled or self.gone is not None:
            return False
        return self.restoration is None or self.restoration.is_over.is_set()

    @property
    def next_seq_id(self) -> int:
        """Of the first operation that has neither begun nor failed."""
        seq_id = self.next_to_enter
        while (before := self.operations.get(seq_id - 1)) is not None and _waits(before):
            seq_id -= 1
        while (following := self.operations.get(seq_id)) is not None and following.replayed:
            seq_id += 1
        return seq_id

    @property
    def num_queued(self) -> int:
        """Operations that have been accepted and have not begun."""
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
        """Models that this process could not restore."""
        self.parked: set[str] = set()
        """Live models that are on the disk only (parking.py)."""
        self.coming: set[str] = set()
        """Ids of models on their way back into memory. Each of them has its place already."""
        self.released = asyncio.Event()
        """Set whenever a model may have become idle, or has gone. A task that waits for a place clears it."""
        metrics.memory.parked_models.set_function(lambda: len(self.parked))

    def __len__(self) -> int:
        """Number of models in memory or on their way there."""
        return len(self._queues) + sum(model_id not in self._queues for model_id in self.coming)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._queues

    def __iter__(self) -> Iterator[ModelQueue]:
        return iter(self._queues.values())

    def __getitem__(self, model_id: str) -> ModelQueue:
        return self._queues[model_id]

    def get(self, model_id: str) -> ModelQueue | None:
        return self._queues.get(model_id)

    def open(self, model_id: str) -> ModelQueue:
        """Makes the queue of a new model, for which there is a place in memory. Raises OutOfCapacity above
        max_known_models."""
        if (num_known := len(self) + len(self.parked)) >= self._max_known_models:
            raise OutOfCapacity(
                f"{num_known} models are live, in memory or parked, this server's max_known_models "
                f"({self._max_known_models}); close a session that is done"
            )
        return self.add(ModelQueue(model_id))

    def add(self, model: ModelQueue) -> ModelQueue:
        """Adds a queue, also above max_models: the model may have been in memory before a restart."""
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
