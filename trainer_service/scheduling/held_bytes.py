"""The memory that accepted operations hold, and its limit."""

from __future__ import annotations

import asyncio
from collections import Counter

from tinsmith.errors import OutOfCapacity
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation


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
