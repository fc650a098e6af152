"""The accepted operations of each model, its position in them, and the memory that they hold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tinsmith.errors import OutOfCapacity, ServiceError
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation

_AHEAD = 16
"""Most operations of a model whose bodies are in memory ahead of their turn in a replay."""


@dataclass(slots=True, eq=False)
class Restoration:
    """The restoration of a model, after a restart or after it was parked."""

    num_left: int
    """Number of operations that have answers from before and have not run again yet."""
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
    """Set when the model was deleted or given up: the error of its remaining operations."""
    restoration: Restoration | None = None
    """The restoration of a model from before a restart or from being parked; None for a model made by this process."""
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
        self.moved: dict[str, ServiceError] = {}
        """Errors of the models that were released for another trainer, or are being released, by model_id."""
        self.parked: set[str] = set()
        """Ids of live models that are on disk only (parking.py)."""
        self.coming: set[str] = set()
        """Ids of models that are being brought back into memory. Each has its place in memory already."""
        self.moves: dict[str, asyncio.Task[Any]] = {}
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

    def is_away(self, model_id: str) -> bool:
        """True for a model that is parked, or is being parked or brought back."""
        return model_id in self.moves or model_id in self.parked

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


class HeldBytes:
    """Bytes held by the operations of all models, with a common limit. Used on one event loop; the metrics may read it
    on another thread.

    A model may hold at most as many bytes as are free (Choudhury and Hahne 1998, "Dynamic queue length thresholds for
    shared-memory packet switches", with a factor of 1). So one model gets at most half of the limit. n models that take
    all they can leave a share of 1 / (n + 1) free, so a further model is never shut out.
    """

    def __init__(self, metrics: Metrics, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.total = 0
        self._by_model: Counter[str] = Counter()
        self._next: set[Operation] = set()
        """Operations that were accepted as the next of their model, with none before them."""
        self._released = asyncio.Event()
        metrics.operations.held_bytes.set_function(lambda: self.total)
        metrics.operations.held_limit_bytes.set(max_bytes)

    @property
    def max_operation_bytes(self) -> int:
        """Most bytes of one operation; an operation that would hold more can never be accepted."""
        return self.max_bytes // 2

    def check(self, model_id: str, num_bytes: int) -> None:
        """Raises OutOfCapacity when the model may not hold so many more bytes at this moment."""
        own = self._by_model[model_id]
        if own + num_bytes > self.max_bytes - self.total - num_bytes:
            raise OutOfCapacity(
                f"{model_id}: its operations hold {own} bytes of memory and this one needs {num_bytes}, which is more "
                f"than its share of this server's max_queued_bytes {self.max_bytes}: all operations hold {self.total}"
            )

    def check_next(self, model_id: str, num_bytes: int) -> None:
        """Like `check`, for an operation with no other of its model before it.

        Beyond the limit, half as much memory again is reserved for such operations. None of them waits for another
        operation, so each will release its memory, and each gets some in the end.
        """
        held = sum(operation.held_bytes for operation in self._next if not operation.outcome.done())
        if held + num_bytes > self.max_operation_bytes:
            self.check(model_id, num_bytes)

    def hold(self, operation: Operation, num_bytes: int, *, is_next: bool = False) -> None:
        """Counts so many bytes for an operation, instead of those counted before. The limit is not checked."""
        if is_next:
            self._next.add(operation)
        self._add(operation.model_id, num_bytes - operation.held_bytes)
        operation.held_bytes = num_bytes

    def release(self, operation: Operation) -> None:
        self.hold(operation, 0)
        self._next.discard(operation)
        self._released.set()

    async def next_release(self) -> None:
        """Returns when an operation releases its memory."""
        self._released.clear()
        await self._released.wait()

    def _add(self, model_id: str, num_bytes: int) -> None:
        self.total += num_bytes
        self._by_model[model_id] += num_bytes
        if not self._by_model[model_id]:
            del self._by_model[model_id]


def _waits(operation: Operation) -> bool:
    return not operation.has_begun and not operation.replayed and not operation.outcome.done()
