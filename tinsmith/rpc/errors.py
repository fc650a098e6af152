"""Maps the errors of `tinsmith/errors.py` to google.rpc.Status and back: the form in which they travel between
processes and lie in the journal."""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tinsmith.errors import NotReady, ServiceError

DOMAIN = "tinsmith"
_RETRY_S = 1
"""Delay before another try for errors that name none, in seconds."""


def _subclasses(cls: type[ServiceError]) -> list[type[ServiceError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


_BY_REASON = {cls.reason: cls for cls in _subclasses(ServiceError)}


# A status travels in the trailing metadata, its message twice. gRPC drops trailing metadata above 8 KiB, and the status
# with it.
MAX_MESSAGE_BYTES = 1200
_MAX_METADATA_BYTES = 200
_MAX_DESCRIPTION_BYTES = 400


def shortened(text: str, *, limit: int = MAX_MESSAGE_BYTES) -> str:
    """At most `limit` bytes of the text, cut in the middle: the beginning says what is wrong, and the end often what
    would be right."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    end = limit // 4
    start = limit - end - len(" ... ")
    return f"{data[:start].decode(errors='ignore')} ... {data[-end:].decode(errors='ignore')}"


def to_proto(error: ServiceError) -> status_pb2.Status:
    """The error as google.rpc.Status with an ErrorInfo. An error about a field of the request also has a BadRequest. An
    error that may not occur in another try also has a RetryInfo.

    Long messages are cut in the middle.
    """
    metadata = {key: shortened(value, limit=_MAX_METADATA_BYTES) for key, value in error.metadata.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if "field" in metadata and error.code in ("INVALID_ARGUMENT", "UNIMPLEMENTED"):
        text = shortened(error.message, limit=_MAX_DESCRIPTION_BYTES)
        violation = error_details_pb2.BadRequest.FieldViolation(field=metadata["field"], description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        delay = Duration(seconds=int(metadata.get("retry_after_s", _RETRY_S)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    message = shortened(error.message)
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code), message=message, details=[_packed(one) for one in details]
    )


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def from_proto(status: status_pb2.Status) -> ServiceError:
    """The inverse of to_proto. A status that no Tinsmith service made becomes a plain ServiceError that names its gRPC
    code."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in _BY_REASON:
            return _BY_REASON[info.reason](status.message, **info.metadata)
    return ServiceError(f"{code_pb2.Code.Name(status.code)}: {status.message}")


def to_bytes(error: ServiceError) -> bytes:
    """The error as a serialized google.rpc.Status."""
    return to_proto(error).SerializeToString()


def from_bytes(data: bytes) -> ServiceError:
    """The inverse of to_bytes. Raises DecodeError for bytes that are no google.rpc.Status."""
    return from_proto(status_pb2.Status.FromString(data))


def to_status(error: ServiceError) -> grpc.Status:
    """The error as the status with which a gRPC call is ended."""
    return rpc_status.to_status(to_proto(error))


def is_from_service(error: grpc.aio.AioRpcError) -> bool:
    """Whether the error carries a status of the service. False when the transport failed."""
    return rpc_status.from_call(error) is not None  # type: ignore[arg-type]  # the stubs know only the sync call


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The ServiceError that a failed call stands for. UNAVAILABLE from the transport becomes NotReady."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the stubs know only the sync call
    if status is not None:
        return from_proto(status)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return NotReady(error.details() or "the service cannot be reached")
    return ServiceError(f"{error.code().name}: {error.details()}")
