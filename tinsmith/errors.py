"""Errors that cross a process boundary. `tinsmith/rpc/errors.py` has their form on the wire.

ServiceError                 INTERNAL             server
├── InvalidRequest           INVALID_ARGUMENT     user     the caller's mistake; names the field and the value
│   └── UnknownLossFn
├── Unsupported              UNIMPLEMENTED        user     a field that this server cannot honour
├── NotFound                 NOT_FOUND            user
│   ├── ModelNotFound
│   ├── CheckpointNotFound
│   └── ResultNotFound                                     unknown or expired operation
├── AlreadyExists            ALREADY_EXISTS       user
│   ├── CheckpointExists
│   └── SequenceConflict                                   same seq_id, other body
├── FailedPrecondition       FAILED_PRECONDITION  user
│   ├── VersionNotLoaded                                   ask the trainer to publish it, then try again
│   ├── VersionGone                                        the location holds other weights by now
│   ├── VersionRefused                    server           the samplers' logprobs differ from the trainer's
│   ├── VersionConflict                   server           a sampler serves other weights under this id
│   ├── NotFinite                                          a step, or the model's logprobs, would not be finite
│   ├── ModelLost                                          the trainer restarted and does not hold the model
│   └── BudgetExceeded                                     an owner has used up its tokens or its storage
├── Unauthenticated          UNAUTHENTICATED      server   a gRPC call without a key; the gateway's own, for the SDK
├── PermissionDenied         PERMISSION_DENIED    user     a gRPC call that this key may not make
├── OutOfCapacity            RESOURCE_EXHAUSTED   server   a queue, a cache or a disk is full
│   └── RateLimited                                        too many requests or tokens in this minute
├── NotReady                 UNAVAILABLE          server   loading or draining
│   ├── EngineDead                                         the process is about to end, and must be restarted
│   └── ModelMoved                                         the model is moving to another trainer, or has moved
├── DataCorrupted            DATA_LOSS            server   a checksum does not match
└── Cancelled                CANCELLED            server   the caller has gone; only the metrics show this error

The category is shown by the Tinker SDK: "user" for the caller's mistake, "server" for the server's, "unknown" if it is
neither.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Literal

Category = Literal["user", "server", "unknown"]


class ServiceError(Exception):
    """An error with a code, a reason and a category, which the caller gets, too."""

    code = "INTERNAL"
    """Name of the gRPC status code."""
    reason = "INTERNAL"
    """Name of the error in Tinsmith, which distinguishes errors with one code."""
    category: Category = "server"
    """The side that made the mistake, in the words of the Tinker SDK: user, server or unknown."""

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}
        """Among others `field`, the path of the wrong value from the root of the request, such as
        "data[3].loss_fn_inputs.target_tokens"."""

    def move(self, before: str, after: str) -> None:
        """Replaces the prefix `before` of the field's path by `after`, also in the message. An error about another
        field, or about none, stays as it is."""
        field = self.metadata.get("field", "")
        if not field or not field.startswith(before):
            return
        self.metadata["field"] = after + field.removeprefix(before)
        if self.message.startswith(re.split(r"\W", field, maxsplit=1)[0]):
            self.message = after + self.message.removeprefix(before)
            self.args = (self.message,)


class InvalidRequest(ServiceError):
    code, reason, category = "INVALID_ARGUMENT", "INVALID_REQUEST", "user"


class UnknownLossFn(InvalidRequest):
    reason = "UNKNOWN_LOSS_FN"


class Unsupported(ServiceError):
    code, reason, category = "UNIMPLEMENTED", "UNSUPPORTED", "user"


class NotFound(ServiceError):
    code, reason, category = "NOT_FOUND", "NOT_FOUND", "user"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class CheckpointNotFound(NotFound):
    reason = "CHECKPOINT_NOT_FOUND"


class ResultNotFound(NotFound):
    reason = "RESULT_NOT_FOUND"


class AlreadyExists(ServiceError):
    code, reason, category = "ALREADY_EXISTS", "ALREADY_EXISTS", "user"


class CheckpointExists(AlreadyExists):
    reason = "CHECKPOINT_EXISTS"


class SequenceConflict(AlreadyExists):
    reason = "SEQUENCE_CONFLICT"


class FailedPrecondition(ServiceError):
    code, reason, category = "FAILED_PRECONDITION", "FAILED_PRECONDITION", "user"


class VersionNotLoaded(FailedPrecondition):
    reason = "VERSION_NOT_LOADED"


class VersionGone(FailedPrecondition):
    reason = "VERSION_GONE"


class VersionRefused(FailedPrecondition):
    reason, category = "VERSION_REFUSED", "server"


class VersionConflict(FailedPrecondition):
    reason, category = "VERSION_CONFLICT", "server"


class NotFinite(FailedPrecondition):
    reason = "NOT_FINITE"


class ModelLost(FailedPrecondition):
    reason, category = "MODEL_LOST", "server"


class BudgetExceeded(FailedPrecondition):
    reason = "BUDGET_EXCEEDED"


class Unauthenticated(ServiceError):
    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDenied(ServiceError):
    code, reason, category = "PERMISSION_DENIED", "PERMISSION_DENIED", "user"


class OutOfCapacity(ServiceError):
    code, reason = "RESOURCE_EXHAUSTED", "OUT_OF_CAPACITY"


class RateLimited(OutOfCapacity):
    """Too many requests or tokens in this minute. `retry_after_s` in the metadata is the time after which another try
    is worthwhile, in whole seconds."""

    reason = "RATE_LIMITED"


class NotReady(ServiceError):
    code, reason = "UNAVAILABLE", "NOT_READY"


class EngineDead(NotReady):
    reason = "ENGINE_DEAD"


class ModelMoved(NotReady):
    """The model is moving to another trainer, or has moved. `trainer_id` in the metadata is the id of that trainer."""

    reason = "MODEL_MOVED"


class DataCorrupted(ServiceError):
    code, reason = "DATA_LOSS", "DATA_CORRUPTED"


class Cancelled(ServiceError):
    code, reason = "CANCELLED", "CANCELLED"


@contextlib.contextmanager
def within(outer: str) -> Iterator[None]:
    """Prefixes the field of a ServiceError that the block raises with `outer`, the field of the request that holds the
    message which the block checks. The error then names the field from the root of the request."""
    try:
        yield
    except ServiceError as error:
        error.move("", f"{outer}.")
        raise


@contextlib.contextmanager
def about(field: str) -> Iterator[None]:
    """Sets `field` as the field of a ServiceError that the block raises, whatever part of its content the error
    named."""
    try:
        yield
    except ServiceError as error:
        error.metadata["field"] = field
        raise


def storable(error: StopIteration) -> RuntimeError:
    """A RuntimeError that a future can hold in place of `error`. A future refuses a StopIteration, and a caller that
    awaits the future would wait for ever."""
    stored = RuntimeError(repr(error))
    stored.__cause__ = error
    return stored
