"""Errors that cross a process boundary, and the only place that maps them.

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
│   ├── VersionRefused                    server           samplers do not compute it as the trainer does
│   ├── VersionConflict                   server           a sampler serves other weights under this id
│   ├── NotFinite                                          a step, or the model's own logprobs, leave float32
│   ├── ModelLost                                          the trainer restarted and does not hold the model
│   └── BudgetExceeded                                     an owner has used, or stores, what it may
├── Unauthenticated          UNAUTHENTICATED      server   a gRPC call without a key; the gateway's own, for the SDK
├── PermissionDenied         PERMISSION_DENIED    user     a gRPC call that this key may not make
├── OutOfCapacity            RESOURCE_EXHAUSTED   server   a queue, a cache or a disk is full
│   └── RateLimited                                        too much in this minute
├── NotReady                 UNAVAILABLE          server   loading or draining
│   └── EngineDead                                         the process is about to end, and to be started again
├── DataCorrupted            DATA_LOSS            server   a checksum does not match
└── Cancelled                CANCELLED            server   the caller has left; nobody hears of it but the metrics

Category is what the Tinker SDK shows: "user" for the caller's mistake, "server" for ours, "unknown" for neither.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Literal

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

Category = Literal["user", "server", "unknown"]

DOMAIN = "tinsmith"
_RETRY_S = 1
"""Time after which another try is worth while, where the error names none, in seconds."""


class ServiceError(Exception):
    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"
    category: Category = "server"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}
        """`field`: path of the wrong value from the root of the request: "data[3].loss_fn_inputs.target_tokens"."""

    def move(self, before: str, after: str) -> None:
        """Replaces the beginning `before` of the field's path by `after`, in the message, too. Does nothing to an error
        about another field, or about none."""
        field = self.metadata.get("field", "")
        if not field or not field.startswith(before):
            return
        self.metadata["field"] = after + field.removeprefix(before)
        if self.message.startswith(re.split(r"\W", field, maxsplit=1)[0]):
            self.message = after + self.message.removeprefix(before)
            self.args = (self.message,)


class InvalidRequest(ServiceError):
    code, reason, category = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "user"


class UnknownLossFn(InvalidRequest):
    reason = "UNKNOWN_LOSS_FN"


class Unsupported(ServiceError):
    code, reason, category = grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED", "user"


class NotFound(ServiceError):
    code, reason, category = grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "user"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class CheckpointNotFound(NotFound):
    reason = "CHECKPOINT_NOT_FOUND"


class ResultNotFound(NotFound):
    reason = "RESULT_NOT_FOUND"


class AlreadyExists(ServiceError):
    code, reason, category = grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", "user"


class CheckpointExists(AlreadyExists):
    reason = "CHECKPOINT_EXISTS"


class SequenceConflict(AlreadyExists):
    reason = "SEQUENCE_CONFLICT"


class FailedPrecondition(ServiceError):
    code, reason, category = grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION", "user"


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
    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(ServiceError):
    code, reason, category = grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", "user"


class OutOfCapacity(ServiceError):
    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_CAPACITY"


class RateLimited(OutOfCapacity):
    """`retry_after_s` in its metadata: whole seconds after which it is worth another try."""

    reason = "RATE_LIMITED"


class NotReady(ServiceError):
    code, reason = grpc.StatusCode.UNAVAILABLE, "NOT_READY"


class EngineDead(NotReady):
    reason = "ENGINE_DEAD"


class DataCorrupted(ServiceError):
    code, reason = grpc.StatusCode.DATA_LOSS, "DATA_CORRUPTED"


class Cancelled(ServiceError):
    code, reason = grpc.StatusCode.CANCELLED, "CANCELLED"


@contextlib.contextmanager
def within(outer: str) -> Iterator[None]:
    """Errors about a field of a nested message name the field from the root of the request, which holds the message in
    its field `outer`."""
    try:
        yield
    except ServiceError as error:
        error.move("", f"{outer}.")
        raise


@contextlib.contextmanager
def about(field: str) -> Iterator[None]:
    """Errors name this field of the request, whatever part of its content they name."""
    try:
        yield
    except ServiceError as error:
        error.metadata["field"] = field
        raise


def _subclasses(cls: type[ServiceError]) -> list[type[ServiceError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


_BY_REASON = {cls.reason: cls for cls in _subclasses(ServiceError)}
_CODE_NUMBERS = {code: code.value[0] for code in grpc.StatusCode}


# A status travels in trailing metadata, its message twice. gRPC drops what is above 8 KiB of them, status and all.
_MAX_MESSAGE_BYTES = 1200
_MAX_METADATA_BYTES = 200
_MAX_DESCRIPTION_BYTES = 400


def _shortened(text: str, *, limit: int) -> str:
    """At most `limit` bytes of it: the beginning says what is wrong, the end often what would be right."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    end = limit // 4
    start = limit - end - len(" ... ")
    return f"{data[:start].decode(errors='ignore')} ... {data[-end:].decode(errors='ignore')}"


def to_proto(error: ServiceError) -> status_pb2.Status:
    """google.rpc.Status with an ErrorInfo: the form in which errors travel and lie in the journal. A mistake in
    the request also has a BadRequest. An error that another try may mend also has a RetryInfo.

    Messages that quote a long value are cut in the middle.
    """
    metadata = {key: _shortened(value, limit=_MAX_METADATA_BYTES) for key, value in error.metadata.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if "field" in metadata and error.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        text = _shortened(error.message, limit=_MAX_DESCRIPTION_BYTES)
        violation = error_details_pb2.BadRequest.FieldViolation(field=metadata["field"], description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        delay = Duration(seconds=int(metadata.get("retry_after_s", _RETRY_S)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    message = _shortened(error.message, limit=_MAX_MESSAGE_BYTES)
    return status_pb2.Status(code=_CODE_NUMBERS[error.code], message=message, details=[_packed(one) for one in details])


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def from_proto(status: status_pb2.Status) -> ServiceError:
    """The inverse of to_proto; a status that is not ours becomes a plain ServiceError with its gRPC code named."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in _BY_REASON:
            return _BY_REASON[info.reason](status.message, **info.metadata)
    return ServiceError(f"{code_pb2.Code.Name(status.code)}: {status.message}")


def to_status(error: ServiceError) -> grpc.Status:
    return rpc_status.to_status(to_proto(error))


def is_from_service(error: grpc.aio.AioRpcError) -> bool:
    """False when the transport failed, and the service has said nothing."""
    return rpc_status.from_call(error) is not None  # type: ignore[arg-type]  # the stubs know only the sync call


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """What a failed call means. UNAVAILABLE from the transport becomes NotReady."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the stubs know only the sync call
    if status is not None:
        return from_proto(status)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return NotReady(error.details() or "the service cannot be reached")
    return ServiceError(f"{error.code().name}: {error.details()}")
