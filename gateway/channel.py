"""Channels to trainers and samplers, on which a failed call raises a ServiceError instead of gRPC's error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from tinsmith.errors import EngineDead, ModelMoved, NotReady, ServiceError
from tinsmith.rpc import channel as rpc
from tinsmith.rpc.errors import from_rpc_error, is_from_service
from tinsmith.rpc.tls import Certificates

T = TypeVar("T")

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes of a call whose service went away or is not ready, so that the call may be made again."""
_NESTED = ("request", "chat", "header")
"""Fields of gRPC requests (StreamSample, Tokenize, ImportCheckpoint) whose content HTTP requests have at their root."""


class ConnectionLost(NotReady):
    """The connection failed, so it is not known whether the service executed the call."""


class DeadlineExceeded(ServiceError):
    """The service did not answer within the call's timeout."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


def connect(
    address: str, *, api_key: str = "", certificates: Certificates | None = None, resends: bool = True
) -> grpc.aio.Channel:
    """A channel of `tinsmith.rpc.channel.connect` whose calls raise `meaning(error)` instead of AioRpcError."""
    channel = rpc.connect(address, api_key=api_key, certificates=certificates, resends=resends)
    for kind in _KINDS:
        setattr(channel, kind, _mapped(getattr(channel, kind), is_written=kind.startswith("stream")))
    return channel


def _mapped(make: Callable[..., Any], *, is_written: bool) -> Callable[..., Any]:
    def make_mapped(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        start = make(*args, **kwargs)
        return lambda *args, **kwargs: _Call(start(*args, **kwargs), is_written=is_written)

    return make_mapped


class _Call:
    """A call of an RPC that raises ServiceErrors. An interceptor would be slower, as `tinsmith.rpc.channel` explains.

    A call to which messages are written keeps the error with which it ended. If a message was being written then, gRPC
    replaces the error by "INTERNAL: Internal error from Core".
    """

    __slots__ = ("_call", "_error")

    def __init__(self, call: Any, *, is_written: bool) -> None:
        self._call = call
        self._error: grpc.aio.AioRpcError | None = None
        if is_written:
            call.add_done_callback(self._keep_error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        with self._meant():
            return (yield from self._call.__await__())

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        with self._meant():
            return await self._call.read()

    async def write(self, request: Any) -> None:
        with self._meant():
            await self._call.write(request)

    async def done_writing(self) -> None:
        with self._meant():
            await self._call.done_writing()

    async def wait_for_connection(self) -> None:
        with self._meant():
            await self._call.wait_for_connection()

    @contextmanager
    def _meant(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise meaning(self._error or error) from error

    def _keep_error(self, call: Any) -> None:
        """Keeps the error with which the call ended. gRPC calls this whenever it sets the call's status, so a second
        time when it replaces the status."""
        code = _result(call.code())
        if code != grpc.StatusCode.OK:
            error = grpc.aio.AioRpcError(
                code,
                grpc.aio.Metadata(),
                _result(call.trailing_metadata()) or grpc.aio.Metadata(),
                details=_result(call.details()),
            )
            if code != grpc.StatusCode.INTERNAL or is_from_service(error):
                self._error = error


def _result(done: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for. Raises RuntimeError if it waits."""
    try:
        done.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError(f"{done} waits")


def meaning(error: grpc.aio.AioRpcError) -> ServiceError:
    """The ServiceError of a failed call. It is NotReady when the service went away or is not ready, and the subclass
    ConnectionLost when the connection failed and the service itself did not answer."""
    meant = from_rpc_error(error)
    for message in _NESTED:
        meant.move(f"{message}.", "")
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not is_from_service(error):
        return DeadlineExceeded(meant.message)
    if error.code() not in _LOST or isinstance(meant, EngineDead | ModelMoved):
        return meant
    is_broken = error.code() == grpc.StatusCode.UNAVAILABLE and not is_from_service(error)
    return (ConnectionLost if is_broken else NotReady)(error.details() or "the service went away")
