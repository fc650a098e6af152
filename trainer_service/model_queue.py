"""A model's accepted operations, and where it stands in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tinsmith.rpc.errors import ServiceError
from trainer_service.work import Operation


@dataclass(slots=True, eq=False)
class Call:
    """What the coroutine of an operation wants from the compute thread."""

    operation: Operation
    run: Callable[[], Any]
    result: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class ModelQueue:
    model_id: str
    next_seq_id: int = 0
    operations: dict[int, Operation] = field(default_factory=dict)
    """Those whose results are not in the journal yet."""
    head: Operation | None = None
    """The operation that has started and not yet had its turn on the compute thread."""
    ready: Operation | Call | None = None
    """What of it waits for the compute thread: a batch, or a coroutine's call."""
    unsettled: set[Operation] = field(default_factory=set)
    """Started operations without a result."""
    gone: ServiceError | None = None
    """Why nothing of this model runs any more."""

    @property
    def queued(self) -> list[Operation]:
        return [operation for seq_id, operation in self.operations.items() if seq_id >= self.next_seq_id]

    def in_turn(self) -> Iterator[Operation]:
        """The operations that have not had their turn, in order, up to the first that has not arrived."""
        seq_id = self.next_seq_id
        while (operation := self.operations.get(seq_id)) is not None:
            yield operation
            seq_id += 1
