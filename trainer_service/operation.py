"""The record of an operation, from its arrival until its answer is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tinsmith.errors import ServiceError
from tinsmith.rpc import tracing
from tinsmith.v1 import trainer_pb2
from trainer_service.engine.batch import Batch

T = TypeVar("T")

Answer = trainer_pb2.WaitResultResponse
Outcome = Answer | ServiceError


class Turn(Protocol):
    """An operation's place in its model's order."""

    async def run(self, call: Callable[[], T], *, canary_tokens: int | None = None) -> T:
        """Runs `call` on the compute thread in the model's order: after all its earlier operations, and before all
        later ones. `canary_tokens`: tokens of the canary, when the call scores that; None for another call.

        An operation may call this once. The model's next operation may start as soon as this call waits for its turn.
        """
        ...

    def storing(self) -> AbstractAsyncContextManager[None]:
        """A context for reading or writing a checkpoint. An operation is given up when the process has died in this
        context too often."""
        ...

    async def settled(self) -> None:
        """Waits until every earlier operation of the model has its result."""
        ...

    async def earlier_stored(self) -> None:
        """Waits until every earlier operation of the model has its result in the journal."""
        ...

    async def stored(self) -> None:
        """Waits until this operation and every earlier one of the model has its result in the journal."""
        ...


Work = Batch | Callable[[Turn], Coroutine[Any, Any, Answer]]
"""The work of an operation: a batch, or a coroutine function that gets the operation's Turn."""


@dataclass(slots=True, eq=False)
class Call:
    """A function that runs on the compute thread."""

    operation: Operation | None
    """None for a call that belongs to no operation."""
    run: Callable[[], Any]
    result: asyncio.Future[Any]
    canary_tokens: int | None = None
    """Tokens of the canary, when the call scores that, as the samplers do at the same time; None for another call."""
    name: tuple[str, int] | None = None
    """Name of a call that belongs to no operation, for the record of executions (durability/executing.py). None for the
    trainer's own calls, which depend on no request."""


@dataclass(slots=True, eq=False)
class Operation:
    """An operation: a request that must be executed in its model's order."""

    model_id: str
    seq_id: int
    kind: str
    digest: bytes
    """Digest of the request, by which a repeat is distinguished from a conflict."""
    accepted: asyncio.Future[ServiceError | None]
    """None once the operation is in the journal, or the error that kept it out."""
    outcome: asyncio.Future[Outcome]
    message_bytes: int = 0
    """Memory of the request's message, in bytes; 0 for an operation that was read from the journal."""
    work: Work | None = None
    """None until the operation is in the journal, and after a restart until its body has been read."""
    is_arriving: bool = False
    """True from the operation's acceptance until its work has been made."""
    makes_model: bool = False
    """True for the creation, and after a restart for the reading of a snapshot."""
    replayed: bool = False
    """True when the operation has had its answer since before a restart, and runs again only to change the model."""
    held_bytes: int = 0
    """Bytes that the operation counts for in HeldBytes (scheduling/held_bytes.py)."""
    arrived_s: float = field(default_factory=time.perf_counter)
    """Time of arrival, by time.perf_counter."""
    arrived_at: float = field(default_factory=time.time)
    """Time of arrival, in seconds since 1970."""
    trace: Any = field(default_factory=tracing.current)
    """Trace of the call that brought the operation; None while tracing is off."""
    ran: tuple[float, float] | None = None
    """Times at which the compute thread began and ended the operation, in seconds since 1970; None when it has not
    run."""
    has_begun: bool = False
    """True when the compute thread has begun the operation. Until then it counts as queued."""
    call: Call | None = None
    """The operation's call on the compute thread, once it has a place there; None for a batch."""
    result: asyncio.Future[Any] | None = None
    """The Output of a batch, or the result of the call; None before the operation has a place on the compute thread."""
    stopped_by: ServiceError | None = None
    """Why a batch that had begun was stopped. An error of its computation is in the batch instead."""
    is_computed: bool = False
    """True when the compute thread has nothing more to do for the operation."""
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the result is in the journal, or can never be stored there."""

    @property
    def batch(self) -> Batch | None:
        """The work of a forward_backward; None for other operations, and for a request that was refused."""
        return self.work if isinstance(self.work, Batch) else None

    @property
    def changes_model(self) -> bool:
        """False when a replay need not run the operation."""
        return self.kind != "save_checkpoint" if self.batch is None else not self.batch.forward_only

    @property
    def num_waiting_tokens(self) -> int:
        """Charged tokens of the datums that have not begun; 0 for a call."""
        return 0 if self.batch is None else self.batch.num_waiting_tokens

    @property
    def is_waiting(self) -> bool:
        """True when the compute thread has not begun the operation, or not all of its datums."""
        return not self.has_begun if self.batch is None else self.batch.num_waiting > 0

    @property
    def has_ended(self) -> bool:
        """True when nothing of a batch is left to run after the current micro-batch."""
        assert self.batch is not None
        return self.stopped_by is not None or self.batch.error is not None or not self.batch.num_waiting

    async def wait(self) -> Answer:
        """The answer, or its error. Cancelling this wait does not cancel the operation."""
        outcome = await asyncio.shield(self.outcome)
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome
