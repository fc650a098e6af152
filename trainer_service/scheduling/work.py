"""The scheduler's types: an operation, its work, and the interfaces of engine and batch. Imports no torch."""

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
    """One example of a batch, as far as the scheduler needs it."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    @property
    def charge(self) -> int:
        """Tokens that the datum counts for in its model's turns and in a micro-batch."""
        ...

    @property
    def loss_s(self) -> float:
        """Expected time of its custom loss, in seconds; 0 for other losses."""
        ...


class Batch(Protocol):
    """The data of a forward_backward, as far as the scheduler needs it."""

    @property
    def forward_only(self) -> bool: ...

    @property
    def datums(self) -> Sequence[Datum]: ...

    @property
    def held_bytes(self) -> int:
        """Memory that the batch takes with its request and its answer, in bytes."""
        ...


class Output(Protocol):
    def to_proto(self) -> trainer_pb2.ForwardBackwardResponse: ...


class Job(Protocol):
    """A forward_backward that the engine has begun."""

    error: ServiceError | None
    """Why the job has failed. The engine sets it in `run`; the compute thread sets it to stop the job."""
    loss_seconds: float
    """Time of the custom loss that its model has not been charged for yet, in seconds. `run` adds to it."""

    def piece(self, indices: Sequence[int]) -> Any:
        """The datums at these indices, for `run`."""
        ...


class BatchEngine(Protocol):
    """The engine, as far as the scheduler itself calls it. Operations other than batches bring their own calls.

    All methods are called on the compute thread. For each job `begin` is called once, then `run` with every datum once,
    in pieces of any size, then `finish` once. After a failure the remaining datums are not run.
    """

    @property
    def token_budget(self) -> int:
        """Most tokens of a micro-batch at present. A longer datum is a micro-batch by itself."""
        ...

    def begin(self, model_id: str, batch: Any) -> Job:
        """Makes a job. Raises ServiceError when the batch can never be computed."""
        ...

    def run(self, pieces: Sequence[Any]) -> None:
        """Computes one micro-batch: pieces of any models' jobs, either all forward_only or none. A job that fails gets
        its `error`."""
        ...

    def finish(self, job: Any) -> Output | ServiceError:
        """The result, or the job's error. After an error the model's next optim_step fails, because gradients are
        missing."""
        ...

    def taint(self, model_id: str, reason: str, *, seq_id: int) -> None:
        """Makes the model's next optim_step fail with `reason`, for a forward_backward `seq_id` that has no job."""
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

    async def run(self, call: Callable[[], T], *, canary_tokens: int | None = None) -> T:
        """Runs `call` on the compute thread, after everything before it, and before everything after it.
        `canary_tokens`: tokens of the canary, when the call scores that; None for another call.

        Once for each operation. The model's next operation may start as soon as this call waits for its turn.
        """
        ...

    def storing(self) -> AbstractContextManager[None]:
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


Work = RunBatch | Callable[[Turn], Coroutine[Any, Any, Answer]]
"""The work of an operation: a batch, or a coroutine function that gets the operation's Turn."""


@dataclass(slots=True, eq=False)
class Operation:
    """An accepted operation, from its arrival until its answer is stored."""

    model_id: str
    seq_id: int
    kind: str
    digest: bytes
    """Digest of the request, by which a repeat is distinguished from a conflict."""
    accepted: asyncio.Future[ServiceError | None]
    """None once the operation is in the journal, or the error that kept it out."""
    outcome: asyncio.Future[Answer | ServiceError]
    work: Work | None = None
    """None until the operation is in the journal, and after a restart until its body has been read."""
    founds: bool = False
    """True when the operation makes the model: the creation, or after a restart the reading of a snapshot."""
    replayed: bool = False
    """True when the operation has had its answer since before a restart, and runs again only to change the model."""
    held_bytes: int = 0
    """Bytes that the operation counts for in HeldBytes (held.py)."""
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
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the result is in the journal, or will never be."""

    @property
    def changes_model(self) -> bool:
        """False when a replay need not run the operation."""
        if isinstance(self.work, RunBatch):
            return not self.work.batch.forward_only
        return self.kind != "save_checkpoint"

    async def wait(self) -> Answer:
        """The answer, or its error. Cancelling this wait does not cancel the operation."""
        outcome = await asyncio.shield(self.outcome)
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome
