"""The gRPC server of every service: keys, health, reflection, a size limit, one error handler and a graceful stop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.received_answers import request_begins
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.auth import KeyInterceptor, KeyRing, given_key, host_of
from tinsmith.rpc.errors import to_status
from tinsmith.rpc.message_memory import BOUNDED, MessageMemory, Reservation
from tinsmith.rpc.parts import check_parts, refuse_unknown
from tinsmith.rpc.paths import run_of
from tinsmith.rpc.reflection import add_reflection
from tinsmith.rpc.tls import Certificates, PinnedCertificate, warn_of_clear_text
from tinsmith.threads import in_pool

logger = logging.getLogger(__name__)

_RETRIES = "grpc-previous-rpc-attempts"
"""Metadata of a call that gRPC made before, by the client's `retryPolicy`."""
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest gRPC message, in bytes. The gateway's limit for HTTP bodies is lower."""

_ARRIVING_MESSAGES = 4
"""Memory for messages of calls without BOUNDED, in messages of the largest size. A message counts from before it
arrives until the service has accepted it."""


ACCEPTED = ("x-tinsmith-accepted", "1")
"""Initial metadata with which the trainer acknowledges an operation: it is in the journal. It says nothing about the
outcome."""

REPEATED = ("x-tinsmith-repeated", "1")
"""Initial metadata, besides ACCEPTED, of an operation that was in the trainer's journal before this call."""

UNREAD = "unread"
"""Key in the metadata of an error. It means that the message was refused before its service saw it, so the operation's
seq_id is still free."""

RAN = "x-tinsmith-ran"
"""Key of the trailing metadata "<start>:<end>", the time in which the service computed the call, in seconds since
1970."""

_UNLIMITED = MessageMemory(0, message_bytes=0)
"""Unlimited memory, for calls of clients that bound their memory themselves, and for health checks."""

_FEW_BYTES = 64 * 1024
"""Messages up to this size are decoded without a walk along the wire, which counts parts and finds unknown fields."""

_Context = grpc.aio.ServicerContext[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Sends a ServiceError as google.rpc.Status with an ErrorInfo. Logs any other exception, and sends INTERNAL.

    The log lines of a call carry the request id that came with the call, and the model that its request names. The
    memory of messages is bounded here (`tinsmith.rpc.message_memory`), unless the client bounds it.
    """

    def __init__(self, memory: MessageMemory, admin_keys: Sequence[str] | None) -> None:
        """`admin_keys`: BOUNDED counts only in calls with one of these keys. With None it counts in every call."""
        self._memory = memory
        self._admins = None if admin_keys is None else KeyRing(admin_keys)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """A handler that reads messages only when memory is reserved for them. It reads every call as a stream, because
        a single message is a stream of one on the wire.

        gRPC gets no deserializer, because a message that it cannot parse would raise outside of the handler.
        """
        handler = await continuation(handler_call_details)
        # The handlers of reflection and of Health.Watch, a coroutine that writes to its context, raise no ServiceError.
        if handler is None or handler.stream_stream is not None or inspect.iscoroutinefunction(handler.unary_stream):
            return handler
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata or ()
        named = dict(metadata)
        is_bounded = not method.startswith("/tinsmith.") or self._is_bounded(metadata)
        memory = _UNLIMITED if is_bounded else self._memory

        def begin() -> _Reporting:
            request_begins(is_retry=_RETRIES in named)
            logs.request_id.set(str(named.get(logs.REQUEST_ID_METADATA, "")))
            return _Reporting(method, metadata)

        async def parsed(reservation: Reservation, context: _Context) -> Any:
            return await _parse(handler, await reservation.message(context), method)

        async def all_parsed(context: _Context) -> AsyncGenerator[Any, None]:
            while True:
                with await memory.reserve() as reservation:
                    if (body := await reservation.next_message(context)) is None:
                        return
                    message = await _parse(handler, body, method)
                    del body
                    yield message

        async def answer(_: object, context: _Context) -> Any:
            with begin() as reporting:
                if handler.stream_unary is not None:
                    async with aclosing(all_parsed(context)) as messages:
                        return await handler.stream_unary(messages, context)
                with await memory.reserve() as reservation:
                    return await handler.unary_unary(await parsed(reservation, context), context)
            await reporting.abort(context)

        async def stream(_: object, context: _Context) -> AsyncIterator[Any]:
            with begin() as reporting:
                with await memory.reserve() as reservation:
                    async for response in handler.unary_stream(await parsed(reservation, context), context):
                        yield response
                return
            await reporting.abort(context)

        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    def _is_bounded(self, metadata: Any) -> bool:
        if BOUNDED not in tuple(metadata):
            return False
        return self._admins is None or self._admins.find(given_key(dict(metadata))) is not None


class _Reporting:
    """Context manager for the work of one call. It keeps the error of the work for `abort`, and logs one that is no
    ServiceError.

    gRPC's AbortError and the context refer to each other. Whatever the frames of the error's traceback hold would stay
    until Python's next full collection, which may be minutes away. So `abort` is called outside of the block, by a
    caller that has dropped the message, and the kept error has no traceback.
    """

    def __init__(self, method: str, metadata: Any) -> None:
        self._method = method
        self._span = tracing.serve(method, metadata)
        self._error: ServiceError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, ServiceError):
            self._error = error.with_traceback(None)
            error.__cause__ = error.__context__ = None
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            logger.error("%s failed", self._method, exc_info=error)
            self._error = ServiceError("internal error; the log has the cause")
        tracing.end(self._span, error=self._error.reason if self._error else "")
        return self._error is not None

    async def abort(self, context: _Context) -> None:
        """Ends the call with the error. The status's trailing metadata would replace the handler's, so both are
        sent."""
        assert self._error is not None
        status = to_status(self._error)
        metadata = (*(context.trailing_metadata() or ()), *(status.trailing_metadata or ()))
        await context.abort(status.code, status.details, metadata)


async def _parse(handler: Any, body: bytes, method: str) -> Any:
    try:
        message = await _decoded(handler, body, method)
    except InvalidRequest as error:
        error.metadata[UNREAD] = "true"
        raise
    logs.model_id.set(_model_of(getattr(message, "request", message)))  # StreamSample wraps a SampleRequest
    return message


async def _decoded(handler: Any, body: bytes, method: str) -> Any:
    decode = handler.request_deserializer
    if len(body) > _FEW_BYTES:
        await in_pool(check_parts, body, decode.__self__.DESCRIPTOR)  # a message type's FromString
    try:
        message = decode(body)
    except DecodeError:
        raise InvalidRequest(f"the request of {method} is not its message in protobuf") from None
    if len(body) <= _FEW_BYTES and method.startswith("/tinsmith."):  # clients of health and reflection may be newer
        refuse_unknown(message, body)
    return message


def _model_of(message: Any) -> str:
    """The model that a message names, directly or by one of the model's versions; empty if it names none."""
    named = getattr(message, "model_id", "") or getattr(message, "run_id", "")
    return named or run_of(getattr(message, "version_id", ""))


class Server:
    """A grpc.aio server. Its health is NOT_SERVING until set_serving(True).

    `api_keys`: accepted keys; without any, the server accepts every call. `admin_keys`: the accepted keys that may also
    call the admin services. `certificates`: encrypt the connections; callers must then have a certificate of the same
    authority.
    """

    def __init__(
        self,
        address: str,
        file_descriptors: Sequence[FileDescriptor],
        *,
        api_keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        certificates: Certificates | PinnedCertificate | None = None,
    ) -> None:
        self.grpc = grpc.aio.server(
            interceptors=[
                *([KeyInterceptor(api_keys, admin_keys)] if api_keys else []),
                ErrorInterceptor(
                    MessageMemory(_ARRIVING_MESSAGES * MAX_MESSAGE_BYTES, message_bytes=MAX_MESSAGE_BYTES),
                    admin_keys if api_keys else None,
                ),
            ],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Clients ping every 20 s while a call lasts (channel.py). By default gRPC closes a connection whose
                # pings come more often than every five minutes.
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                # `lookahead_bytes` of a message arrive before its call has reserved memory (message_memory.py). By
                # default megabytes would arrive, as many as the connection can carry. Messages of 100 kB to 20 MB take
                # as long with this setting as by default.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", 1024 * 1024),
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent second listener
            ],
        )
        self._services = [name for file in file_descriptors for name in _service_names(file)]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        add_reflection(self._services, self.grpc)
        try:
            if certificates is not None:
                self.port = self.grpc.add_secure_port(address, certificates.server())
            else:
                warn_of_clear_text(
                    host_of(address), what=f"gRPC at {address}", remedy="set grpc_ca, grpc_cert, grpc_key"
                )
                self.port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise SystemExit(f"cannot listen on {address}: is the port in use? ({error})") from None

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._services]:
            await self._health.set(name, status)

    async def start(self) -> None:
        await self.set_serving(False)
        await self.grpc.start()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once. Running calls have `grace_s` seconds to end."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


def _service_names(file: FileDescriptor) -> list[str]:
    return [service.full_name for service in file.services_by_name.values()]


@asynccontextmanager
async def stop_event() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets while the block runs."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
