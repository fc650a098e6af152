"""The work that waits for the compute thread, in a lane for each model, and the choice of the next work.

A lane holds a model's batches and calls in order. The batches before its first call are open: their datums share
micro-batches with other models', fairly (fairness.py). A call runs when everything before it in its lane is over, and
everything behind it waits. So a step sees all gradients before it and none after it. A pipelined step is in the lane
before its turn comes, so the compute thread need not wait for the event loop between a batch and its step.

Calls run between micro-batches, at most one of each model in a row. So a micro-batch waits for at most one call of each
model, and a call for at most one micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer_service.engine.batch import Batch
from trainer_service.operation import Call, Operation
from trainer_service.scheduling.fairness import DeficitRoundRobin

MicroBatch = Sequence[tuple[Operation, range]]
"""Operations with indices of their batches' datums."""


@dataclass(slots=True)
class _Lane:
    operations: deque[Operation] = field(default_factory=deque)
    num_calls: int = 0


class Lanes:
    """All models' lanes; see the module's docstring. Not thread safe."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: no two batches share a micro-batch."""
        self._lanes: dict[str, _Lane] = {}
        self._ring = DeficitRoundRobin(alone=alone)
        self._of_batch: dict[Batch, Operation] = {}
        """Operations with batches in the ring, and those of the current micro-batch."""
        self._calls: deque[Call] = deque()
        """Calls that may run now: the first ones of their lanes, and those of `put_first`."""
        self._calls_before_batch = 0
        """Number of calls that run before the next micro-batch."""

    def put(self, operation: Operation) -> None:
        """Adds an operation at the end of its model's lane."""
        lane = self._lanes.setdefault(operation.model_id, _Lane())
        lane.operations.append(operation)
        if operation.call is not None:
            lane.num_calls += 1
            if len(lane.operations) == 1:
                self._calls.append(operation.call)
        elif not lane.num_calls:
            self._open(operation)

    def put_first(self, call: Call) -> None:
        """Adds a call outside the lanes, which runs next."""
        self._calls.appendleft(call)
        self._calls_before_batch += 1

    def next(
        self, budget: int, go_together: Callable[[Sequence[str]], bool] = lambda _: True
    ) -> Call | MicroBatch | None:
        """Takes the next work of the compute thread; None when nothing is ready. `budget`: most tokens of a
        micro-batch. `go_together`: see DeficitRoundRobin.next_micro_batch.

        `end` must be called for each operation that is over.
        """
        if self._calls and (self._calls_before_batch > 0 or not self._ring):
            self._calls_before_batch = max(0, self._calls_before_batch - 1)
            return self._calls.popleft()
        micro_batch = self._ring.next_micro_batch(budget, go_together)
        return [(self._of_batch[batch], indices) for batch, indices in micro_batch] or None

    def charge(self, model_id: str, tokens: int) -> None:
        """Charges a model for costs beyond the tokens of its datums."""
        self._ring.charge(model_id, tokens)

    def end_micro_batch(self) -> None:
        """Called after a micro-batch. The calls that wait now run before the next micro-batch."""
        self._calls_before_batch = len(self._calls)

    def end(self, operation: Operation) -> None:
        """Removes an operation that is computed or has failed from its lane. A batch's remaining datums are dropped."""
        operation.is_computed = True
        if operation.batch is not None:
            self._of_batch.pop(operation.batch, None)
            self._ring.drop(operation.batch)
        lane = self._lanes.get(operation.model_id)
        if lane is None or operation not in lane.operations:  # its lane was withdrawn
            return
        lane.operations.remove(operation)
        if not lane.operations:
            del self._lanes[operation.model_id]
        elif operation.call is not None:
            lane.num_calls -= 1
            for following in lane.operations:
                if following.call is not None:
                    break
                self._open(following)
        if lane.operations and (first := lane.operations[0].call) is not None:
            self._calls.append(first)

    def withdraw(self, model_id: str) -> list[Operation]:
        """Removes a model's lane. Returns the operations that the compute thread will not end after its current
        work."""
        lane = self._lanes.pop(model_id, None)
        if lane is None:
            return []
        self._ring.remove(model_id)
        withdrawn = [operation for operation in lane.operations if operation.is_waiting]
        for operation in withdrawn:
            if operation.batch is not None:
                self._of_batch.pop(operation.batch, None)
            elif operation.call in self._calls:
                self._calls.remove(operation.call)
        return withdrawn

    def withdraw_all(self) -> list[Operation | Call]:
        """Removes all lanes and calls. Returns operations as `withdraw` does, and calls that belong to none."""
        withdrawn = [operation for model_id in list(self._lanes) for operation in self.withdraw(model_id)]
        without, self._calls = self._calls, deque()
        return [*withdrawn, *without]

    def waiting(self) -> dict[str, list[Operation]]:
        """The operations of each model that have not ended, in order. Copies lists only, so it is fast."""
        return {model_id: list(lane.operations) for model_id, lane in self._lanes.items()}

    def next_of_each(self) -> list[Operation]:
        """For each model with waiting operations, the one that begins next."""
        following = (
            next((operation for operation in lane.operations if not operation.has_begun), None)
            for lane in self._lanes.values()
        )
        return [operation for operation in following if operation is not None]

    def _open(self, operation: Operation) -> None:
        """Lets a batch's datums join micro-batches."""
        assert operation.batch is not None
        self._of_batch[operation.batch] = operation
        self._ring.add(operation.batch)
