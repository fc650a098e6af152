"""A bound on the memory of messages that arrive at a gRPC server, for all clients together.

gRPC reads a message as a whole, and tells its size only then. So a call reserves memory for the largest message before
its message is read. Until then HTTP/2's flow control lets only a little of the message through. Once the message has
been read, the call keeps as many bytes reserved as the message has, until the service counts the request's memory
itself. Small messages keep nothing reserved.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

import grpc.aio

from tinsmith.errors import InvalidRequest, OutOfCapacity

BOUNDED = ("x-tinsmith-bounded", "1")
"""Metadata of a call whose client bounds the memory of its calls itself, as a gateway does with max_held_body_bytes.
Such a call reserves nothing. The metadata counts only with the service key, or a key with `admin`; on a service without
keys it always counts."""

_SMALL_BYTES = 64 * 1024
"""Messages up to this size keep nothing reserved."""
_WAIT_S = 30.0
"""A call that has waited this long for memory is refused."""
_SLOW_S = 10.0
"""A message may take this long to arrive. After that, and each time that it has taken so long again, its call is
refused if another call waits for memory."""

_Context = grpc.aio.ServicerContext[Any, Any]


class MessageMemory:
    """Memory for arriving messages, in bytes. Calls reserve it in the order in which they ask."""

    def __init__(self, max_bytes: int, *, message_bytes: int, wait_s: float = _WAIT_S, slow_s: float = _SLOW_S) -> None:
        """`message_bytes`: size of the largest message. `wait_s`, `slow_s`: see `_WAIT_S` and `_SLOW_S`."""
        assert message_bytes <= max_bytes
        self.max_bytes = max_bytes
        self.message_bytes = message_bytes
        self.slow_s = slow_s
        self.num_bytes = 0
        """Reserved bytes."""
        self._wait_s = wait_s
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    @property
    def is_full(self) -> bool:
        """Whether a call waits for memory."""
        return bool(self._waiting)

    async def reserve(self) -> Reservation:
        """Waits until memory for the largest message is free, and reserves it. Raises OutOfCapacity after `wait_s`."""
        if not self._waiting and self._fits_another():
            self.num_bytes += self.message_bytes
            return Reservation(self)
        reserved = asyncio.get_running_loop().create_future()
        self._waiting[reserved] = None
        try:
            async with asyncio.timeout(self._wait_s):
                await reserved  # `release` reserves the memory for this call
        except BaseException as error:
            self._waiting.pop(reserved, None)
            if reserved.done() and not reserved.cancelled():  # the memory was reserved at the same moment
                self.release(self.message_bytes)
            if isinstance(error, TimeoutError):
                raise self.refusal("too few are left for another one") from None
            raise
        return Reservation(self)

    def release(self, num_bytes: int) -> None:
        """Frees reserved bytes, and reserves memory for the calls that wait, as far as it reaches."""
        self.num_bytes -= num_bytes
        while self._waiting and self._fits_another():
            reserved, _ = self._waiting.popitem(last=False)
            if not reserved.done():  # it is done if the waiting call was cancelled
                self.num_bytes += self.message_bytes
                reserved.set_result(None)

    def refusal(self, why: str) -> OutOfCapacity:
        return OutOfCapacity(
            f"this service holds at most {self.max_bytes} bytes of arriving messages, {self.num_bytes} of which are "
            f"taken, and {why}; try again"
        )

    def _fits_another(self) -> bool:
        return self.num_bytes + self.message_bytes <= self.max_bytes


class Reservation:
    """The memory that one call has reserved. A context manager that releases it at the end."""

    def __init__(self, memory: MessageMemory) -> None:
        self._memory = memory
        self._num_bytes = memory.message_bytes

    def __enter__(self) -> Self:
        _reservation.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shrink(0)

    async def next_message(self, context: _Context) -> bytes | None:
        """Reads the next message of the call into the reserved memory. Returns None after the last message. Raises
        OutOfCapacity for a message that arrives slowly while other calls wait for memory."""
        body = await (self._read(context) if self._memory.max_bytes else context.read())
        if body is grpc.aio.EOF:
            return None
        self.shrink(len(body) if len(body) > _SMALL_BYTES else 0)
        return body

    async def _read(self, context: _Context) -> Any:
        memory = self._memory
        reading: asyncio.Future[Any] = asyncio.ensure_future(context.read())
        try:
            while not (await asyncio.wait({reading}, timeout=memory.slow_s))[0]:
                if memory.is_full:
                    raise memory.refusal(f"this one has not arrived within {memory.slow_s:g} s")
        finally:
            if not reading.done():
                reading.cancel()
        return reading.result()

    async def message(self, context: _Context) -> bytes:
        """Reads the only message of a call. Raises the errors of `next_message`, and InvalidRequest for a call without
        a message."""
        body = await self.next_message(context)
        if body is None:
            raise InvalidRequest("the call has no message")
        return body

    def shrink(self, num_bytes: int) -> None:
        """Releases all but `num_bytes`. Does nothing if no more than that are reserved."""
        if num_bytes < self._num_bytes:
            self._memory.release(self._num_bytes - num_bytes)
            self._num_bytes = num_bytes


_reservation: ContextVar[Reservation | None] = ContextVar("reservation", default=None)


def is_taken_over() -> None:
    """Releases the memory that the present call has reserved, because its service counts the request's memory from now
    on. Does nothing in a call that has reserved none."""
    if (reservation := _reservation.get()) is not None:
        reservation.shrink(0)
