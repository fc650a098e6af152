"""The work that waits for the compute thread, in a lane for each model, and the choice of the next work.

A lane holds a model's batches and calls in order. The batches before its first call are open: their datums share
micro-batches with other models', fairly (fairness.py). A call runs when everything before it in its lane is over, and
everything behind it waits. So a step sees all gradients before it and none after it. A pipelined step is in the lane
before its turn comes, so the compute thread need not wait for the event loop between a batch and its step.

Calls run between micro-batches, at most one of each model in a row. So a micro-batch waits for at most one call of each
model, and a call for at most one micro-batch.
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
    """A function that runs on the compute thread, for the coroutine of an operation."""

    operation: Operation | None
    """None for a call that belongs to no operation."""
    run: Callable[[], Any]
    result: asyncio.Future[Any]
    canary_tokens: int | None = None
    """Tokens of the canary, when it scores that, as the samplers do at the same time; None for another call."""
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        return 0

    @property
    def may_be_withdrawn(self) -> bool:
        return self.operation is None or not self.operation.has_begun


@dataclass(slots=True, eq=False)
class BatchRun:
    """A forward_backward that runs in micro-batches."""

    operation: Operation
    batch: Batch
    load: Load
    """Its datums, with the tokens that each is charged for, including those for the time of its custom loss."""
    result: asyncio.Future[Output]
    job: Job | None = None
    """The engine's job; None before the first micro-batch, and when the engine refused the batch."""
    error: ServiceError | None = None
    """Why the batch was stopped, or why the engine refused it. Errors while it runs are in the job."""
    is_over: bool = False
    """True when nothing of it will run any more, and its result is known."""

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
        """`speed`: converts the expected time of custom losses into tokens; without it that time is not charged.
        `alone`: the batch shares no micro-batch."""
        more = [0 if speed is None or not one.loss_s else speed.loss_tokens(one.loss_s) for one in batch.datums]
        lengths = [one.charge + tokens for one, tokens in zip(batch.datums, more, strict=True)]
        return cls(operation, batch, Load(lengths, batch.forward_only, alone=alone), result)

    def num_charged(self, indices: Sequence[int]) -> int:
        """Charge of these datums in tokens, without the time of their losses."""
        return sum(self.batch.datums[index].charge for index in indices)

    @property
    def num_tokens(self) -> int:
        """Charged tokens of the datums that still wait."""
        return self.load.num_tokens

    @property
    def has_ended(self) -> bool:
        """True when nothing of the batch is left to run after the current micro-batch."""
        failed = self.error is not None or (self.job is not None and self.job.error is not None)
        return failed or not self.load.num_waiting

    @property
    def may_be_withdrawn(self) -> bool:
        return self.load.num_waiting > 0


Item = Call | BatchRun
MicroBatch = Sequence[tuple[BatchRun, range]]
"""Batches with the indices of their datums."""


@dataclass(slots=True)
class _Lane:
    items: deque[Item] = field(default_factory=deque)
    num_calls: int = 0


class Lanes:
    """All models' lanes; see the module's docstring. Not thread safe."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: no two batches share a micro-batch."""
        self._lanes: dict[str, _Lane] = {}
        self._ring = DeficitRoundRobin(alone=alone)
        self._runs: dict[Load, BatchRun] = {}
        """Batches in the ring, and those of the current micro-batch, by their loads."""
        self._calls: deque[Call] = deque()
        """Calls that may run now: the first ones of their lanes, and those of `put_first`."""
        self._calls_before_batch = 0
        """Number of calls that run before the next micro-batch."""

    def put(self, model_id: str, item: Item) -> None:
        """Adds an item at the end of the model's lane."""
        lane = self._lanes.setdefault(model_id, _Lane())
        lane.items.append(item)
        if isinstance(item, Call):
            lane.num_calls += 1
            if len(lane.items) == 1:
                self._calls.append(item)
        elif not lane.num_calls:
            self._open(model_id, item)

    def put_first(self, call: Call) -> None:
        """Adds a call outside the lanes, which runs next."""
        self._calls.appendleft(call)
        self._calls_before_batch += 1

    def next(self, budget: int) -> Call | MicroBatch | None:
        """Takes the next work of the compute thread; None when nothing is ready. `budget`: most tokens of a
        micro-batch.

        `end` must be called for each item that is over.
        """
        if self._calls and (self._calls_before_batch > 0 or not self._ring):
            self._calls_before_batch = max(0, self._calls_before_batch - 1)
            return self._calls.popleft()
        parts = self._ring.next_micro_batch(budget)
        return [(self._runs[load], indices) for load, indices in parts] or None

    def charge(self, model_id: str, tokens: int) -> None:
        """Charges a model for costs beyond the tokens of its datums."""
        self._ring.charge(model_id, tokens)

    def end_micro_batch(self) -> None:
        """Called after a micro-batch. The calls that wait now run before the next micro-batch."""
        self._calls_before_batch = len(self._calls)

    def end(self, model_id: str, item: Item) -> None:
        """Removes an item that has run or failed from its lane. The remaining datums of a batch are dropped."""
        item.is_over = True
        if isinstance(item, BatchRun):
            self._runs.pop(item.load, None)
            self._ring.drop(model_id, item.load)
        lane = self._lanes.get(model_id)
        if lane is None or item not in lane.items:  # its lane was withdrawn
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
        """Removes a model's lane. Returns the items that the compute thread will not end after its current work."""
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
        """Removes all lanes and calls, and returns items as `withdraw` does."""
        withdrawn = [item for model_id in list(self._lanes) for item in self.withdraw(model_id)]
        alone, self._calls = self._calls, deque()
        return [*withdrawn, *alone]

    def waiting(self) -> dict[str, list[Item]]:
        """The items of each model that have not ended, in order. Copies lists only, so it is fast."""
        return {model_id: list(lane.items) for model_id, lane in self._lanes.items()}

    def next_of_each(self) -> list[Operation]:
        """For each model with waiting operations, the one that begins next."""
        following = (
            next((item.operation for item in lane.items if item.operation and not item.operation.has_begun), None)
            for lane in self._lanes.values()
        )
        return [operation for operation in following if operation is not None]

    def _open(self, model_id: str, run: BatchRun) -> None:
        """Lets a batch's datums join micro-batches."""
        self._runs[run.load] = run
        self._ring.add(model_id, run.load)
