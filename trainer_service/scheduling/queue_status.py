"""Describes what an operation waits for, in numbers and in words.

Models share the compute thread equally, by tokens. So while a model computes the R tokens up to the end of an
operation, every other model computes R tokens too, or as many as it has.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from trainer_service.operation import Operation
from trainer_service.scheduling.compute import Backlog, Running
from trainer_service.scheduling.model_queue import ModelQueue
from trainer_service.scheduling.speed import Speed


@dataclass(slots=True)
class QueueStatus:
    """The reason for which an operation waits. types.proto describes the fields of the message of this name."""

    reason: str = ""
    running: bool = False
    position: int = 0
    tokens_ahead: int = 0
    expected_s: float | None = None
    """Time until the operation ends, in seconds; None before the first measurement."""


FINISHED = QueueStatus(reason="has finished", expected_s=0.0)

_BEFORE = {
    "create_model": "the checkpoint is being read",
    "load_checkpoint": "the checkpoint is being read",
    "save_checkpoint": "waits until the saves before it are written",
}
_AFTER = {"save_checkpoint": "the checkpoint is being written"}

_FEW = 1000
"""Sums over no more operations than this are added up anew for each question."""
_KEPT = 20
"""Sums over more operations are kept for this many times the time that adding them up took."""


@dataclass(slots=True)
class _Sums:
    """The operations of one model that wait for the compute thread, in order, with sums over the first n of them.

    The sums name the operations and do not refer to them: they may outlive the operations, whose data takes gigabytes.
    """

    places: Mapping[int, int]
    """seq_id -> place."""
    tokens: Sequence[int]
    """Tokens of the first n operations; a call has none."""
    calls: Sequence[int]
    """Number of calls among the first n operations."""

    def __len__(self) -> int:
        return len(self.places)

    def beside(self, num_tokens: int) -> int:
        """Number of operations that this model computes, at least in part, while another model computes `num_tokens`
        tokens."""
        if num_tokens:
            return bisect_left(self.tokens, num_tokens, hi=len(self))
        return bisect_right(self.tokens, 0) - 1  # the calls before its first batch


_NOTHING = _Sums({}, [0], [0])

Lanes = Mapping[str, _Sums]
"""Sums over the lane of each model that has operations on the compute thread."""


def added_up(backlog: Backlog) -> Lanes:
    return {model_id: _sums_of(list(backlog.waiting(model_id))) for model_id in backlog.operations}


def _sums_of(works: Sequence[tuple[Operation, int]]) -> _Sums:
    tokens, calls = [0], [0]
    for _, number in works:
        tokens.append(tokens[-1] + number)
        calls.append(calls[-1] + (number == 0))
    return _Sums({operation.seq_id: place for place, (operation, _) in enumerate(works)}, tokens, calls)


class Queue:
    """The lanes of all models, added up. Clients ask about each of tens of thousands of waiting operations, and the
    event loop answers. So sums over many operations are kept, and serve all questions for some time."""

    def __init__(self, backlog: Callable[[], Backlog]) -> None:
        self._backlog = backlog
        self._lanes: Lanes = {}
        self._kept_until_s = 0.0

    def lanes(self) -> Lanes:
        if (began_s := time.perf_counter()) >= self._kept_until_s:
            self._lanes = added_up(self._backlog())
            ended_s = time.perf_counter()
            is_long = sum(map(len, self._lanes.values())) > _FEW
            self._kept_until_s = ended_s + _KEPT * (ended_s - began_s) if is_long else 0.0
        return self._lanes


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The operations that are computed up to the end of an operation, except the running ones: those of its model, with
    the operation itself, and those that other models compute meanwhile."""

    counts: Mapping[str, int]
    """Number of operations in each lane, by model."""
    coming: Sequence[Operation]
    """Operations of its own model that have not come to the compute thread yet."""
    num_tokens: int
    num_calls: int
    """Number of operations without tokens."""
    itself: int
    """Tokens of the operation itself; 0 while it runs, and while one before it has not arrived."""
    has_arrived: bool
    """Whether all operations of its model before it have arrived."""

    @classmethod
    def of(cls, operation: Operation, model: ModelQueue, lanes: Lanes, running: Running | None) -> _Ahead:
        lane = lanes.get(model.model_id, _NOTHING)
        place = lane.places.get(operation.seq_id)
        coming: list[Operation] = []
        if place is not None:
            from_lane = place + 1
        elif _runs(operation, running):  # its last micro-batch
            from_lane = 0
        else:
            from_lane = len(lane)
            is_new = operation.seq_id < model.next_to_enter
            num_before = operation.seq_id - model.next_to_enter
            coming = [operation] if is_new else list(islice(model.in_turn(), num_before + 1))
        has_arrived = operation.seq_id < model.next_to_enter or coming[-1:] == [operation]
        coming_tokens = [one.num_waiting_tokens for one in coming]
        itself = 0
        if place is not None:
            itself = lane.tokens[from_lane] - lane.tokens[place]
        elif has_arrived and coming:
            itself = coming_tokens[-1]
        own_tokens = num_tokens = lane.tokens[from_lane] + sum(coming_tokens)
        num_calls = lane.calls[from_lane] + coming_tokens.count(0)
        counts = {model.model_id: from_lane}
        for model_id, other in lanes.items() if from_lane + len(coming) else ():
            if model_id != model.model_id:
                counts[model_id] = count = other.beside(own_tokens)
                num_calls += other.calls[count]
                num_tokens += min(other.tokens[count], own_tokens)
        return cls(counts, coming, num_tokens, num_calls, itself, has_arrived)


def status_of(
    operation: Operation, model: ModelQueue, *, lanes: Lanes, running: Running | None, speed: Speed
) -> QueueStatus:
    """The status of an operation of this model. An operation that came to the compute thread after the lanes were
    added up is behind all of its model's."""
    if operation.outcome.done():
        return FINISHED
    if operation.is_computed:
        return QueueStatus(reason=_AFTER.get(operation.kind, "its result is being stored"))
    elapsed_s = time.perf_counter() - running.started_s if running is not None else 0.0
    now = running.num_tokens if running is not None else 0
    ahead = _Ahead.of(operation, model, lanes, running)
    status = QueueStatus()
    if ahead.has_arrived:
        expected = speed.seconds(
            num_tokens=now + ahead.num_tokens,
            num_calls=ahead.num_calls + (running is not None and running.num_tokens == 0),
        )
        if expected is not None:
            status.expected_s = max(0.0, expected - elapsed_s)
    if operation.has_begun:
        status.running, status.reason = True, "is being computed"
        return status
    beside = () if running is None else running.operations
    num_running = sum(not _is_counted(one, lanes, ahead.counts) for one in beside if one is not operation)
    status.position = sum(ahead.counts.values()) + len(ahead.coming) - ahead.has_arrived + num_running
    status.tokens_ahead = now + ahead.num_tokens - ahead.itself
    status.reason = _reason(operation, model, ahead, status)
    return status


def _reason(operation: Operation, model: ModelQueue, ahead: _Ahead, status: QueueStatus) -> str:
    """The reason for which an operation that has not begun waits, in words."""
    if not ahead.has_arrived:
        missing = model.next_to_enter + len(ahead.coming)
        return f"waits for seq_id {missing} of this model, which has not arrived"
    if operation is model.head:
        return _BEFORE.get(operation.kind, "is about to be computed")
    if status.position:
        return (
            f"waits for its turn: {status.position} operations with {status.tokens_ahead} tokens are before it or "
            "beside it"
        )
    return "is next"


def _is_counted(operation: Operation, lanes: Lanes, counts: Mapping[str, int]) -> bool:
    """Whether the operation is among the first ones of its lane that are counted. `counts`: their number, by model."""
    count = counts.get(operation.model_id, 0)
    return lanes.get(operation.model_id, _NOTHING).places.get(operation.seq_id, count) < count


def queued_tokens(lanes: Lanes, running: Running | None) -> int:
    """The tokens that wait for the compute thread, and those of the micro-batch that runs."""
    return sum(lane.tokens[-1] for lane in lanes.values()) + (running.num_tokens if running is not None else 0)


def queued_s(lanes: Lanes, running: Running | None, speed: Speed) -> float:
    """Expected time until all work that waits for the compute thread has run, in seconds; 0 before the first
    measurement."""
    num_calls = sum(lane.calls[-1] for lane in lanes.values()) + (running is not None and not running.num_tokens)
    return speed.seconds(num_tokens=queued_tokens(lanes, running), num_calls=num_calls) or 0.0


def _runs(operation: Operation, running: Running | None) -> bool:
    return running is not None and operation in running.operations
