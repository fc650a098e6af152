"""A bound on the memory of messages that arrive at a gRPC server, for all clients together.

gRPC reads a message as a whole, and tells its size only then. So a call takes room for the largest message before its
message is read. Until then HTTP/2's flow control lets only a little of the message through. Once the message is there,
the call keeps as much room as the message has bytes, until the service counts the request's memory itself. Small
messages keep none.
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
Such a call takes no room. Only a caller with the service key, or a key with `admin`, is believed; on a service without
keys everyone is."""

_SMALL_BYTES = 64 * 1024
"""Messages up to this size keep no room."""
_WAIT_S = 30.0
"""A call that has waited this long for room is refused."""
_SLOW_S = 10.0
"""A message may take this long to arrive. After that, and each time that it has taken so long again, its call is
refused if another one waits for room."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Arrivals:
    """Room for messages, in bytes. Calls get it in the order in which they ask."""

    def __init__(self, max_bytes: int, *, message_bytes: int, wait_s: float = _WAIT_S, slow_s: float = _SLOW_S) -> None:
        """`message_bytes`: size of the largest message. `wait_s`, `slow_s`: see `_WAIT_S` and `_SLOW_S`."""
        assert message_bytes <= max_bytes
        self.max_bytes = max_bytes
        self.message_bytes = message_bytes
        self.slow_s = slow_s
        self.num_bytes = 0
        """Room that is taken."""
        self._wait_s = wait_s
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    @property
    def is_full(self) -> bool:
        """Whether a call waits for room."""
        return bool(self._waiting)

    async def room(self) -> Room:
        """Waits for room for the largest message. Raises OutOfCapacity if there was none for `wait_s`."""
        if not self._waiting and self._has_room():
            self.num_bytes += self.message_bytes
            return Room(self)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            async with asyncio.timeout(self._wait_s):
                await turn  # `give` takes the room
        except BaseException as error:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():  # the room came at the same moment
                self.give(self.message_bytes)
            if isinstance(error, TimeoutError):
                raise self.refusal("there was no room for another one") from None
            raise
        return Room(self)

    def give(self, num_bytes: int) -> None:
        """Gives room back, to those who wait."""
        self.num_bytes -= num_bytes
        while self._waiting and self._has_room():
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():  # it is done if the waiting call was cancelled
                self.num_bytes += self.message_bytes
                turn.set_result(None)

    def refusal(self, why: str) -> OutOfCapacity:
        return OutOfCapacity(
            f"messages that arrive here have room for {self.max_bytes} bytes, of which {self.num_bytes} are taken, "
            f"and {why}; try again"
        )

    def _has_room(self) -> bool:
        return self.num_bytes + self.message_bytes <= self.max_bytes


class Room:
    """The room of one call; a context manager that gives it back at the end."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._num_bytes = arrivals.message_bytes

    def __enter__(self) -> Self:
        _room.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shrink(0)

    async def next_message(self, context: _Context) -> bytes | None:
        """The call's next message, for which the room is; None after the last one. Raises OutOfCapacity for one that
        is slow while others wait."""
        body = await (self._read(context) if self._arrivals.max_bytes else context.read())
        if body is grpc.aio.EOF:
            return None
        self.shrink(len(body) if len(body) > _SMALL_BYTES else 0)
        return body

    async def _read(self, context: _Context) -> Any:
        arrivals = self._arrivals
        reading: asyncio.Future[Any] = asyncio.ensure_future(context.read())
        try:
            while not (await asyncio.wait({reading}, timeout=arrivals.slow_s))[0]:
                if arrivals.is_full:
                    raise arrivals.refusal(f"this one has not arrived within {arrivals.slow_s:g} s")
        finally:
            if not reading.done():
                reading.cancel()
        return reading.result()

    async def message(self, context: _Context) -> bytes:
        """The only message of a call. Raises what `next_message` raises, and InvalidRequest if there is none."""
        body = await self.next_message(context)
        if body is None:
            raise InvalidRequest("the call has no message")
        return body

    def shrink(self, num_bytes: int) -> None:
        """Gives room back, and keeps `num_bytes`. Does nothing if less is kept already."""
        if num_bytes < self._num_bytes:
            self._arrivals.give(self._num_bytes - num_bytes)
            self._num_bytes = num_bytes


_room: ContextVar[Room | None] = ContextVar("room", default=None)


def is_taken_over() -> None:
    """Gives back the room of the call that is being handled, because its service counts the request's memory from now
    on. Does nothing in a call without room."""
    if (room := _room.get()) is not None:
        room.shrink(0)
