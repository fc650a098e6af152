"""Describes what an operation waits for, in numbers and in words.

Models share the compute thread equally, by tokens. So while a model computes the R tokens up to the end of an
operation, every other model computes R tokens too, or as many as it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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

_Work = tuple[Operation, int]
"""An operation and the number of its tokens to compute; 0 for a call."""


def status_of(operation: Operation, model: ModelQueue, *, backlog: Backlog, speed: Speed) -> QueueStatus:
    """The status of an operation of this model."""
    if operation.outcome.done():
        return FINISHED
    running = backlog.running
    elapsed_s = time.perf_counter() - running.started_s if running is not None else 0.0
    lane = list(backlog.waiting(model.model_id))
    entered = next((n for n, (one, _) in enumerate(lane) if one is operation), None)
    if entered is None and operation.seq_id < model.next_to_enter and not _runs(operation, running):  # is computed
        return QueueStatus(reason=_AFTER.get(operation.kind, "its result is being stored"))
    if entered is not None:
        own = lane[: entered + 1]
    elif operation.seq_id < model.next_to_enter:  # its last micro-batch runs
        own = []
    else:
        coming = islice(model.in_turn(), operation.seq_id - model.next_to_enter + 1)
        own = [*lane, *((one, _tokens(one)) for one in coming)]
    has_arrived = operation.seq_id < model.next_to_enter or (bool(own) and own[-1][0] is operation)
    works = [*own, *(_others(model, sum(tokens for _, tokens in own), backlog) if own else ())]
    now = running.num_tokens if running is not None else 0
    status = QueueStatus()
    if has_arrived:
        num_calls = sum(tokens == 0 for _, tokens in works) + (running is not None and not now)
        expected = speed.seconds(num_tokens=now + sum(tokens for _, tokens in works), num_calls=num_calls)
        if expected is not None:
            status.expected_s = max(0.0, expected - elapsed_s)
    if operation.has_begun:
        status.running, status.reason = True, "is being computed"
        return status
    ahead = {one for one, _ in works} | {*(running.operations if running is not None else ())}
    ahead.discard(operation)
    status.position = len(ahead)
    status.tokens_ahead = now + sum(tokens for one, tokens in works if one is not operation)
    if not has_arrived:
        missing = model.next_to_enter + len(own) - len(lane)
        status.reason = f"waits for seq_id {missing} of this model, which has not arrived"
    elif operation is model.head:
        status.reason = _BEFORE.get(operation.kind, "is about to be computed")
    elif ahead:
        status.reason = (
            f"waits for its turn: {len(ahead)} operations with {status.tokens_ahead} tokens are before it or beside it"
        )
    else:
        status.reason = "is next"
    return status


def queued_tokens(backlog: Backlog) -> list[int]:
    """The tokens of each operation that waits for the compute thread, and those of the micro-batch that runs; 0 for a
    call."""
    tokens = [num for model_id in backlog.operations for _, num in backlog.waiting(model_id)]
    return tokens if backlog.running is None else [*tokens, backlog.running.num_tokens]


def queued_s(backlog: Backlog, speed: Speed) -> float:
    """Expected time until all work that waits for the compute thread has run, in seconds; 0 before the first
    measurement."""
    tokens = queued_tokens(backlog)
    expected = speed.seconds(num_tokens=sum(tokens), num_calls=sum(num == 0 for num in tokens))
    return expected or 0.0


def _others(model: ModelQueue, num_own: int, backlog: Backlog) -> Iterator[_Work]:
    """The work of other models meanwhile: up to `num_own` tokens of each, and the calls between them."""
    for model_id in backlog.operations:
        if model_id == model.model_id:
            continue
        left = num_own
        for operation, tokens in backlog.waiting(model_id):
            if left <= 0 and (tokens or num_own):
                break
            yield operation, min(tokens, left)
            left -= tokens


def _runs(operation: Operation, running: Running | None) -> bool:
    return running is not None and operation in running.operations


def _tokens(operation: Operation) -> int:
    return 0 if operation.batch is None else operation.batch.charge(range(len(operation.batch.datums)))
