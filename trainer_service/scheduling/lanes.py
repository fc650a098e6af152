"""What waits for the compute thread: a lane for each model, in the model's order, and who comes next.

The batches up to a lane's first call are open: their datums share micro-batches, fairly (fairness.py). A call runs when
everything before it in its lane is over, and what is behind it waits for it. So a step sees all gradients before it and
none after it, and what a model has pipelined is here before its turn comes: nobody else is asked between a batch and
the step that follows it.

Calls run between micro-batches, at most one of each model in a row: neither waits for more than one of the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.rpc.errors import ServiceError
from trainer_service.scheduling.fairness import DeficitRoundRobin, Load
from trainer_service.scheduling.speed import Speed
from trainer_service.scheduling.work import Batch, Job, Operation, Output


@dataclass(slots=True, eq=False)
class Call:
    """What the coroutine of an operation wants from the compute thread."""

    operation: Operation | None
    """None for what belongs to no operation."""
    run: Callable[[], Any]
    result: asyncio.Future[Any]
    pass_tokens: int | None = None
    """Tokens that it puts through the base model; None for a call of another kind."""
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        return 0

    @property
    def may_be_withdrawn(self) -> bool:
        return self.operation is None or not self.operation.has_begun


@dataclass(slots=True, eq=False)
class BatchRun:
    """A forward_backward, datum by datum."""

    operation: Operation
    batch: Batch
    load: Load
    """Tokens that each datum counts for, with those for the time of its loss."""
    result: asyncio.Future[Output]
    job: Job | None = None
    """None until its first micro-batch, and when the engine did not take it."""
    error: ServiceError | None = None
    """Why it stops here, or was not taken; what the engine says is in the job."""
    is_over: bool = False

    @classmethod
    def of(
        cls,
        operation: Operation,
        batch: Batch,
        result: asyncio.Future[Output],
        *,
        speed: Speed | None = None,
        alone: bool = False,
    ) -> BatchRun:
        """`speed`: converts the time of custom losses into tokens; without it that time counts for none. `alone`: the
        batch shares no micro-batch."""
        more = [0 if speed is None or not one.loss_s else speed.loss_tokens(one.loss_s) for one in batch.datums]
        lengths = [one.charge + tokens for one, tokens in zip(batch.datums, more, strict=True)]
        return cls(operation, batch, Load(lengths, batch.forward_only, alone=alone), result)

    def num_charged(self, indices: Sequence[int]) -> int:
        """Tokens that these datums count for, without the time of their losses."""
        return sum(self.batch.datums[index].charge for index in indices)

    @property
    def num_tokens(self) -> int:
        """Of what waits."""
        return self.load.num_tokens

    @property
    def has_ended(self) -> bool:
        """Nothing of it is to run any more, once what runs now is done."""
        failed = self.error is not None or (self.job is not None and self.job.error is not None)
        return failed or not self.load.num_waiting

    @property
    def may_be_withdrawn(self) -> bool:
        return self.load.num_waiting > 0


Item = Call | BatchRun
MicroBatch = Sequence[tuple[BatchRun, range]]
"""Datums of batches, by index."""


@dataclass(slots=True)
class _Lane:
    items: deque[Item] = field(default_factory=deque)
    num_calls: int = 0


class Lanes:
    """See the module's docstring. Not thread safe."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: no two batches share a micro-batch."""
        self._lanes: dict[str, _Lane] = {}
        self._ring = DeficitRoundRobin(alone=alone)
        self._runs: dict[Load, BatchRun] = {}  # those in the ring, and those of the micro-batch that runs
        self._calls: deque[Call] = deque()  # the first of their lanes
        self._calls_before_batch = 0

    def put(self, model_id: str, item: Item) -> None:
        lane = self._lanes.setdefault(model_id, _Lane())
        lane.items.append(item)
        if isinstance(item, Call):
            lane.num_calls += 1
            if len(lane.items) == 1:
                self._calls.append(item)
        elif not lane.num_calls:
            self._open(model_id, item)

    def put_first(self, call: Call) -> None:
        """A call of no lane, before all others."""
        self._calls.appendleft(call)
        self._calls_before_batch += 1

    def next(self, budget: int) -> Call | MicroBatch | None:
        """What the compute thread does next; None when nothing is ready. Say `end` when an item is over."""
        if self._calls and (self._calls_before_batch > 0 or not self._ring):
            self._calls_before_batch = max(0, self._calls_before_batch - 1)
            return self._calls.popleft()
        parts = self._ring.next_micro_batch(budget)
        return [(self._runs[load], indices) for load, indices in parts] or None

    def charge(self, model_id: str, tokens: int) -> None:
        """A model has cost more than the tokens of its datums."""
        self._ring.charge(model_id, tokens)

    def end_micro_batch(self) -> None:
        """The calls that wait now go before the next one."""
        self._calls_before_batch = len(self._calls)

    def end(self, model_id: str, item: Item) -> None:
        """It has run, or has failed; what is left of a batch is dropped."""
        item.is_over = True
        if isinstance(item, BatchRun):
            self._runs.pop(item.load, None)
            self._ring.drop(model_id, item.load)
        lane = self._lanes.get(model_id)
        if lane is None or item not in lane.items:  # withdrawn
            return
        lane.items.remove(item)
        if not lane.items:
            del self._lanes[model_id]
        elif isinstance(item, Call):
            lane.num_calls -= 1
            for following in lane.items:
                if isinstance(following, Call):
                    break
                self._open(model_id, following)
        if lane.items and isinstance(first := lane.items[0], Call):
            self._calls.append(first)

    def withdraw(self, model_id: str) -> list[Item]:
        """Takes back a model's lane. Returns what is not over and will not end with what runs now."""
        lane = self._lanes.pop(model_id, None)
        if lane is None:
            return []
        self._ring.remove(model_id)
        withdrawn = [item for item in lane.items if item.may_be_withdrawn]
        for item in withdrawn:
            if isinstance(item, BatchRun):
                self._runs.pop(item.load, None)
            elif item in self._calls:
                self._calls.remove(item)
        return withdrawn

    def withdraw_all(self) -> list[Item]:
        withdrawn = [item for model_id in list(self._lanes) for item in self.withdraw(model_id)]
        alone, self._calls = self._calls, deque()
        return [*withdrawn, *alone]

    def waiting(self) -> dict[str, list[Item]]:
        """For each model what has not ended, in order. Takes no longer than copies of lists do."""
        return {model_id: list(lane.items) for model_id, lane in self._lanes.items()}

    def next_of_each(self) -> list[Operation]:
        """The operation of each model that begins next, if any waits."""
        following = (
            next((item.operation for item in lane.items if item.operation and not item.operation.has_begun), None)
            for lane in self._lanes.values()
        )
        return [operation for operation in following if operation is not None]

    def _open(self, model_id: str, run: BatchRun) -> None:
        self._runs[run.load] = run
        self._ring.add(model_id, run.load)
