"""What the scheduler runs: an operation, its work, and what it must know of an engine. Knows no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tinsmith.rpc.errors import ServiceError
from tinsmith.v1 import trainer_pb2

T = TypeVar("T")

Answer = trainer_pb2.WaitResultResponse


class Batch(Protocol):
    """What the scheduler must know of a batch."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def forward_only(self) -> bool: ...


class Output(Protocol):
    def to_proto(self) -> trainer_pb2.ForwardBackwardResponse: ...


class BatchEngine(Protocol):
    """What the scheduler itself asks of the engine; the other operations bring their own calls."""

    def forward_backward(self, works: Sequence[tuple[str, Any]]) -> Sequence[Output | ServiceError]: ...

    def taint(self, model_id: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RunBatch:
    """The work of a forward_backward."""

    batch: Batch


class Turn(Protocol):
    """An operation's place in its model's order."""

    async def run(self, call: Callable[[], T]) -> T:
        """Runs `call` on the compute thread and lets the model's next operation start. Once for each operation."""
        ...

    async def settled(self) -> None:
        """Waits until every earlier operation of the model has its result."""
        ...


Work = RunBatch | Callable[[Turn], Coroutine[Any, Any, Answer]]
"""What an operation does."""


@dataclass(slots=True, eq=False)
class Operation:
    model_id: str
    seq_id: int
    kind: str
    digest: bytes
    accepted: asyncio.Future[ServiceError | None]
    outcome: asyncio.Future[Answer | ServiceError]
    work: Work | None = None
    """None until the operation is in the journal."""
    arrived_s: float = field(default_factory=time.perf_counter)
    ran: tuple[float, float] | None = None
    """When the compute thread began and ended it, in seconds since 1970; None until then, and when it never ran."""

    async def wait(self) -> Answer:
        """The answer, or its error. Cancelling this wait does not cancel the operation."""
        outcome = await asyncio.shield(self.outcome)
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome
