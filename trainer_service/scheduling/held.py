"""Memory that accepted operations hold, in bytes: from acceptance until the answer is in the journal."""

from __future__ import annotations

import asyncio
from collections import Counter

from tinsmith.rpc.errors import OutOfCapacity
from trainer_service.metrics import Metrics
from trainer_service.scheduling.work import Operation


class HeldBytes:
    """An account of all models, with one bound. On one event loop; the thread that serves the metrics may look.

    A model may hold as many bytes as nobody holds (Choudhury and Hahne 1998, "Dynamic queue length thresholds for
    shared-memory packet switches", with a factor of 1). So one model has at most half, n models that take all they can
    get leave the share 1 / (n + 1) to others, and nobody is kept out by those who came first.
    """

    def __init__(self, metrics: Metrics, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.total = 0
        self._by_model: Counter[str] = Counter()
        self._next: set[Operation] = set()
        """Operations with nothing of their model before them."""
        self._released = asyncio.Event()
        metrics.operations.held_bytes.set_function(lambda: self.total)
        metrics.operations.held_limit_bytes.set(max_bytes)

    @property
    def max_operation_bytes(self) -> int:
        """An operation that would hold more can never be taken."""
        return self.max_bytes // 2

    def check(self, model_id: str, num_bytes: int) -> None:
        """Raises OutOfCapacity where the model may not hold so many bytes more at this moment."""
        own = self._by_model[model_id]
        if own + num_bytes > self.max_bytes - self.total - num_bytes:
            raise OutOfCapacity(
                f"{model_id}: its operations hold {own} bytes of memory and this one needs {num_bytes}, which is more "
                f"than its share of this server's max_queued_bytes {self.max_bytes}: all operations hold {self.total}"
            )

    def check_next(self, model_id: str, num_bytes: int) -> None:
        """Like `check`, for an operation with nothing of its model before it.

        Half as much memory as the bound is reserved for such operations, beside the bound itself. Each of them runs
        without waiting for another, so there is room for every one in the end.
        """
        held = sum(operation.held_bytes for operation in self._next if not operation.outcome.done())
        if held + num_bytes > self.max_operation_bytes:
            self.check(model_id, num_bytes)

    def hold(self, operation: Operation, num_bytes: int, *, is_next: bool = False) -> None:
        """Counts so many bytes for an operation, instead of those that it had. Also above the bound."""
        if is_next:
            self._next.add(operation)
        self._add(operation.model_id, num_bytes - operation.held_bytes)
        operation.held_bytes = num_bytes

    def release(self, operation: Operation) -> None:
        self.hold(operation, 0)
        self._next.discard(operation)
        self._released.set()

    async def next_release(self) -> None:
        self._released.clear()
        await self._released.wait()

    def _add(self, model_id: str, num_bytes: int) -> None:
        self.total += num_bytes
        self._by_model[model_id] += num_bytes
        if not self._by_model[model_id]:
            del self._by_model[model_id]
