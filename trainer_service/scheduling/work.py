"""What the scheduler runs: an operation, its work, and what it must know of an engine. Knows no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tinsmith.rpc import tracing
from tinsmith.rpc.errors import ServiceError
from tinsmith.v1 import trainer_pb2

T = TypeVar("T")

Answer = trainer_pb2.WaitResultResponse


class Datum(Protocol):
    @property
    def length(self) -> int:
        """In tokens."""
        ...

    @property
    def charge(self) -> int:
        """Tokens that it counts for in its model's turns and in a micro-batch."""
        ...

    @property
    def loss_s(self) -> float:
        """Expected time of its custom loss, in seconds; 0 for other losses."""
        ...


class Batch(Protocol):
    """What the scheduler must know of a batch."""

    @property
    def forward_only(self) -> bool: ...

    @property
    def datums(self) -> Sequence[Datum]: ...

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, with its request and its answer."""
        ...


class Output(Protocol):
    def to_proto(self) -> trainer_pb2.ForwardBackwardResponse: ...


class Job(Protocol):
    """A forward_backward that the engine has begun."""

    error: ServiceError | None
    """Why it has failed: the engine sets it in `run`, the compute thread when the job is to stop."""
    loss_seconds: float
    """Time that its custom loss has taken and that its model has not been charged for: `run` adds to it."""

    def piece(self, indices: Sequence[int]) -> Any:
        """Some of its datums, for `run`."""
        ...


class BatchEngine(Protocol):
    """What the scheduler itself asks of the engine; the other operations bring their own calls.

    All of it is called on the compute thread. For each job: `begin` once, `run` with every datum once in pieces of any
    size, `finish` once, when all have run or the job has failed. After a failure nothing of it is run any more.
    """

    @property
    def token_budget(self) -> int:
        """Tokens of one micro-batch, as of now. A longer datum goes alone."""
        ...

    def begin(self, model_id: str, batch: Any) -> Job:
        """Raises ServiceError when the batch can never be computed."""
        ...

    def run(self, pieces: Sequence[Any]) -> None:
        """One micro-batch: pieces of any models' jobs, all of them forward_only or none. Errors of a job go into it."""
        ...

    def finish(self, job: Any) -> Output | ServiceError:
        """The result, or the job's error. After that error the next optim_step knows that gradients are missing."""
        ...

    def taint(self, model_id: str, reason: str, *, seq_id: int) -> None:
        """Says so of a forward_backward that has no job."""
        ...

    def is_dead(self, error: Exception) -> bool:
        """True for an error after which nothing can be computed in this process, whichever operation met it."""
        ...


@dataclass(frozen=True, slots=True)
class RunBatch:
    """The work of a forward_backward."""

    batch: Batch


class Turn(Protocol):
    """An operation's place in its model's order."""

    async def run(self, call: Callable[[], T], *, pass_tokens: int | None = None) -> T:
        """Runs `call` on the compute thread, after everything before it, and before everything after it.
        `pass_tokens`: tokens that it puts through the base model; None for a call of another kind.

        Once for each operation. The model's next operation may start as soon as this call waits for its turn.
        """
        ...

    def storing(self) -> AbstractContextManager[None]:
        """A context for reading or writing a checkpoint. An operation in which the process dies too often is not tried
        again."""
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
    """None until the operation is in the journal, and after a restart until its body has been read."""
    founds: bool = False
    """It makes the model: the creation, or after a restart the reading of a snapshot."""
    replayed: bool = False
    """Its answer is in the journal since before a restart; it runs again for what it does to the model."""
    held_bytes: int = 0
    """Memory that it is counted for (held.py)."""
    arrived_s: float = field(default_factory=time.perf_counter)
    arrived_at: float = field(default_factory=time.time)
    trace: Any = field(default_factory=tracing.current)
    """The call that brought it, for tracing; None while that is off."""
    ran: tuple[float, float] | None = None
    """When the compute thread began and ended it, in seconds since 1970; None until then, and when it never ran."""
    has_begun: bool = False
    """The compute thread has begun it. Until then it counts as queued."""
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    """Its result is in the journal, or will never be."""

    @property
    def changes_model(self) -> bool:
        """False when a replay need not run it."""
        if isinstance(self.work, RunBatch):
            return not self.work.batch.forward_only
        return self.kind != "save_checkpoint"

    async def wait(self) -> Answer:
        """The answer, or its error. Cancelling this wait does not cancel the operation."""
        outcome = await asyncio.shield(self.outcome)
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome
