"""What an operation waits for, in numbers and in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

from tinsmith.v1.types_pb2 import QueueStatus
from trainer_service.compute import Running
from trainer_service.model_queue import ModelQueue
from trainer_service.speed import Speed
from trainer_service.work import Operation, RunBatch

FINISHED = QueueStatus(expected_seconds=0.0, reason="has finished")

_BEFORE = {
    "create_model": "the checkpoint is being read",
    "load_checkpoint": "the checkpoint is being read",
    "save_checkpoint": "waits until the saves before it are written",
}
_AFTER = {"save_checkpoint": "the checkpoint is being written"}


def status_of(
    operation: Operation, model: ModelQueue, *, ready: Sequence[ModelQueue], running: Running | None, speed: Speed
) -> QueueStatus:
    """Of an operation of this model. `ready` and `running` are the compute thread's."""
    elapsed_s = time.perf_counter() - running.started_s if running is not None else 0.0
    if running is not None and operation in running.operations:
        expected = speed.seconds(num_tokens=running.num_tokens, num_calls=int(running.num_tokens == 0))
        return QueueStatus(running=True, expected_seconds=_left(expected, elapsed_s), reason="is being computed")
    if operation.outcome.done():
        return FINISHED
    if operation.seq_id < model.next_seq_id:  # it has had its turn
        return QueueStatus(reason=_AFTER.get(operation.kind, "its result is being stored"))
    own = list(islice(model.in_turn(), operation.seq_id - model.next_seq_id))
    ahead = [*(running.operations if running is not None else ()), *own, *_others(model, len(own), ready)]
    num_tokens = sum(map(_tokens, ahead))
    status = QueueStatus(position=len(ahead), tokens_ahead=num_tokens)
    missing = model.next_seq_id + len(own)
    if missing < operation.seq_id:
        status.reason = f"waits for seq_id {missing} of this model, which has not arrived"
        return status
    works = [*ahead, operation]
    num_calls = sum(_tokens(work) == 0 for work in works)
    expected = speed.seconds(num_tokens=num_tokens + _tokens(operation), num_calls=num_calls)
    if (left := _left(expected, elapsed_s)) is not None:
        status.expected_seconds = left
    if operation is model.head and model.ready is None:
        status.reason = _BEFORE.get(operation.kind, "is about to be computed")
    elif ahead:
        status.reason = f"waits for its turn: {len(ahead)} operations with {num_tokens} tokens are computed before it"
    else:
        status.reason = "is next"
    return status


def _others(model: ModelQueue, num_own: int, ready: Sequence[ModelQueue]) -> list[Operation]:
    """What other models have computed before: they take turns with this one's operations."""
    place = next((n for n, one in enumerate(ready) if one is model), len(ready))
    return [
        operation
        for n, other in enumerate(ready)
        if other is not model
        for operation in islice(other.in_turn(), num_own + (n < place))
    ]


def _tokens(operation: Operation) -> int:
    return operation.work.batch.num_tokens if isinstance(operation.work, RunBatch) else 0


def _left(expected_s: float | None, elapsed_s: float) -> float | None:
    return None if expected_s is None else max(0.0, expected_s - elapsed_s)
