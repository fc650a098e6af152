"""Messages between the event loop and the compute thread: commands one way, the output of each step the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sampler_service.core.request import Delta, Result
from sampler_service.core.task import Task
from sampler_service.core.versions import Version
from sampler_service.torch_engine.planner import Job
from tinsmith.errors import ServiceError
from tinsmith.modeling.full_weights import Weights


@dataclass(frozen=True, slots=True)
class Add:
    """Computes the jobs of one request."""

    jobs: Sequence[Job[Task]]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request with an error."""

    task: Task
    error: ServiceError


@dataclass(frozen=True, slots=True)
class Move:
    """Lets the sequences of some requests go on with another version."""

    tasks: Sequence[Task]
    version: Version
    number: int
    """Under which StepOutput says how many sequences have moved."""


@dataclass(frozen=True, slots=True)
class ForgetVersion:
    """Drops what is kept of a version that no request uses any more."""

    namespace: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class ForgetWarmUp:
    """Drops the speed and the prefixes of the requests that warm the engine up."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the compute thread."""


Command = Add | Cancel | Move | ForgetVersion | ForgetWarmUp | Stop


@dataclass(slots=True)
class StepOutput:
    """Outcome of a step, and of the commands before it, for the event loop."""

    admitted: list[Task] = field(default_factory=list)
    left: list[tuple[Task, Version]] = field(default_factory=list)
    """Versions that a request does not use any more."""
    moved: list[tuple[int, int]] = field(default_factory=list)
    """Number of each move that was made, and how many sequences go on with its version."""
    deltas: list[tuple[Task, Delta]] = field(default_factory=list)
    ended: list[tuple[Task, Result | ServiceError]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.left or self.moved or self.deltas or self.ended)
