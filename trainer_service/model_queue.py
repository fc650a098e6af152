"""A model's accepted operations, and where it stands in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tinsmith.rpc.errors import ServiceError
from trainer_service.work import Operation


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

    @property
    def next_seq_id(self) -> int:
        """Of the first operation that has neither begun nor failed."""
        seq_id = self.next_to_enter
        while (before := self.operations.get(seq_id - 1)) is not None and _waits(before):
            seq_id -= 1
        return seq_id

    @property
    def num_queued(self) -> int:
        """Operations that have been accepted and have not begun."""
        return sum(map(_waits, self.operations.values()))

    def in_turn(self) -> Iterator[Operation]:
        """The operations without a place on the compute thread, in order, up to the first that has not arrived."""
        seq_id = self.next_to_enter
        while (operation := self.operations.get(seq_id)) is not None:
            yield operation
            seq_id += 1


def _waits(operation: Operation) -> bool:
    return not operation.has_begun and not operation.outcome.done()
