"""Bounds on HTTP connections: their number, the size of their headers, and how slow they may be.

uvicorn itself bounds only how long a connection may be idle between two requests. A client that sends its headers or
its body byte by byte, or reads its answer so slowly, would hold memory and a connection for ever. One task checks all
connections at intervals, which costs less than timers for each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import GatewayConfig

if TYPE_CHECKING:
    from starlette.types import Send
    from uvicorn.config import Config
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

BEGAN_S = "tinsmith.began_s"
"""Key in a request's scope: the time at which its headers were complete, by time.monotonic. The request is handled
later if it waits for an earlier one on its connection."""
_AROUND = 4
"""Bytes of a header besides its name and its value."""
_IDLE_S = 15.0
"""Shortest idle time after which a connection may be closed, in seconds. Clients drop idle connections sooner (httpx
after 5 s), so no client sends a request while its connection is being closed."""
_SILENT_FACTOR = 6
"""Factor by which the first byte of a new connection may take longer than headers. A client that is short of processor
time opens hundreds of connections and then writes to one after the other. If they were closed meanwhile, it would open
them again, and never get ahead."""
_UNREAD_BODY_S = 30.0
"""Time for which a connection stays open to receive a body that is not read any more, in seconds."""
_LINGER_S = 1.0
"""Time for which a connection stays open after a refusal, while incoming bytes are thrown away, in seconds. If it were
closed while bytes arrive, the client could lose the answer."""


class _Transfer:
    """Time and progress of a transfer that the gateway waits for."""

    __slots__ = ("num_bytes", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_bytes = 0

    def is_too_long(self, limits: GatewayConfig) -> bool:
        return self.seconds > limits.transfer_grace_s + self.num_bytes / limits.min_transfer_bytes_s


_HELD_BYTES = 4096
"""Longest write that waits for the next one, in bytes."""


class _Transport:
    """A transport that counts the bytes that it has sent, and sends the head of an answer together with its body.

    uvicorn writes the two one after the other, and each write is a call of the system. So a short write waits for the
    next one, until the event loop's next pass at most.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        """`close`: called when uvicorn closes the transport."""
        self._transport = transport
        self._loop = loop
        self._close = close
        self._num_written = 0
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():  # uvloop raises an error for a cut connection; asyncio ignores the data
            return
        self._num_written += len(data)
        if self._held:
            held, self._held = self._held, b""
            self._transport.writelines([held, data])
        elif len(data) <= _HELD_BYTES:
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            if not self._transport.is_closing():
                self._transport.write(held)

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._close()

    def get_write_buffer_size(self) -> int:
        return len(self._held) + self._transport.get_write_buffer_size()

    @property
    def num_sent(self) -> int:
        return self._num_written - self.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """One connection with bounds. `bounded` makes a subclass with `limits` and `by_address` as class attributes."""

    limits: GatewayConfig
    by_address: Counter[str]
    """Open connections of each address."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._address = ""
        self._is_counted = False
        """Whether `by_address` has this connection."""
        self._header_s: float | None = None
        """Time for which the headers of a request have been awaited, in seconds; None while no headers are awaited."""
        self._header_bytes = 0
        self._is_silent = True
        """True while no byte has come."""
        self._receiving: _Transfer | None = None
        """The body that is being received; None when it is complete."""
        self._sending = _Transfer()
        self._num_sent = 0
        self._is_refused = False
        self._closes = False
        """True when the connection is to be closed once the body that is still arriving is complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counting = _Transport(transport, self.loop, partial(self._close, transport))
        super().connection_made(self._counting)  # type: ignore[arg-type]
        self._header_s = 0.0
        self._address = self.client[0] if self.client else ""
        self.by_address[self._address] += 1
        self._is_counted = True
        if len(self.connections) > self.limits.max_connections:
            self._close_one()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _close_one(self) -> None:
        """Closes this connection, or a connection of the address that has most, so that no address can keep all others
        out."""
        address, most = max(self.by_address.items(), key=itemgetter(1))
        closed = self
        if self.by_address[self._address] < most:
            ours = (one for one in self.connections if isinstance(one, BoundedProtocol))
            closed = min((one for one in ours if one._address == address), key=BoundedProtocol._is_working)
        logger.warning(
            "max_connections: %d are open; one of %s is closed", self.limits.max_connections, closed._address
        )
        closed._forget()  # the transport reports its end later
        closed._counting.abort()

    def _is_working(self) -> bool:
        """Whether the connection has a request that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _forget(self) -> None:
        self.connections.discard(self)
        if self._is_counted:
            self._is_counted = False
            self.by_address[self._address] -= 1
            if not self.by_address[self._address]:
                del self.by_address[self._address]

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        receiving = self._receiving
        in_headers = self._header_s is not None
        if self._is_silent:
            self._is_silent, self._header_s = False, 0.0
        super().data_received(data)
        if receiving is not None:
            receiving.num_bytes += len(data)
        if self._header_s is None and self._receiving is None and self.cycle and self.cycle.response_complete:
            # Between two requests. The bytes stopped the keep-alive timer, but began no request: they are the end of a
            # body that nobody reads, or empty lines, which could go on for ever.
            if receiving is None:
                self._header_s = 0.0
            else:
                self._keep_alive()
        if in_headers and self._header_s is not None:  # the headers are still awaited
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.max_header_bytes:
                self._refuse(b"431 Request Header Fields Too Large", f"above {self.limits.max_header_bytes} bytes")

    def idle_s(self) -> float | None:
        """Seconds since the connection's last request; None during a request, or before the first one."""
        if self.timeout_keep_alive_task is None:
            return None
        return self.loop.time() - (self.timeout_keep_alive_task.when() - self.timeout_keep_alive)

    def _keep_alive(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_s is None:
            self._header_s = 0.0
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        self._header_s = None
        self._receiving = _Transfer()
        self.scope[BEGAN_S] = time.monotonic()  # type: ignore[literal-required]
        size = len(self.url) + sum(len(name) + len(value) + _AROUND for name, value in self.headers)
        self.app = _refuse_headers if size > self.limits.max_header_bytes else self.config.loaded_app
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._receiving = None
        super().on_message_complete()
        if self._closes:
            self.transport.close()

    def _close(self, transport: asyncio.Transport) -> None:
        """Closes the connection. If a body is still arriving, waits for its end first.

        A body still arrives when a request was refused before its body was complete, on a connection that is not kept
        alive (urllib's). If the connection were closed while the client sends, the client could lose the answer. So the
        rest of the body is thrown away, for `_UNREAD_BODY_S` at most. A second call, such as that of a gateway that
        stops, closes at once.
        """
        if self._receiving is None or self._closes:
            transport.close()
            return
        self._closes = True
        self.loop.call_later(_UNREAD_BODY_S, transport.close)

    def check(self, seconds: float) -> None:
        """Ends the connection if it is too slow. `seconds`: time since the last call."""
        if self._header_s is not None:
            self._header_s += seconds
            if self._header_s > self.limits.header_timeout_s * (_SILENT_FACTOR if self._is_silent else 1):
                self._refuse(b"408 Request Timeout", "the headers did not come in time")
        elif self._receiving is not None and not self.flow.read_paused:
            self._receiving.seconds += seconds
            if self._receiving.is_too_long(self.limits):
                self._refuse(b"408 Request Timeout", "the body comes too slowly")
        num_sent = self._counting.num_sent
        if self._counting.get_write_buffer_size() == 0:
            self._sending = _Transfer()
        else:
            self._sending.seconds += seconds
            self._sending.num_bytes += num_sent - self._num_sent
            if self._sending.is_too_long(self.limits):
                logger.info("a client reads its answer too slowly; its connection is closed")
                self._counting.abort()
        self._num_sent = num_sent

    def _refuse(self, status: bytes, why: str) -> None:
        """Closes the connection. If no answer has begun, sends an empty answer with this status first."""
        is_first = self.cycle is None or self.cycle.response_complete
        if self._receiving is not None and not self.pipeline:
            is_first |= not self.cycle.response_started
        self._header_s = self._receiving = None
        if self._is_refused or self.transport.is_closing():
            return
        logger.info("a connection is closed: %s", why)
        if is_first:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)


async def _refuse_headers(scope: object, receive: object, send: Send) -> None:
    """An ASGI application that answers 431, for a request whose headers are complete and too large."""
    headers = [(b"connection", b"close"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body"})


def bounded(limits: GatewayConfig) -> type[BoundedProtocol]:
    """A protocol class with these limits, for uvicorn.Config(http=...)."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "by_address": Counter()})


async def watch(connections: set[Any], limits: GatewayConfig) -> None:
    """Checks all connections at intervals, until it is cancelled."""
    interval_s = min(1.0, limits.header_timeout_s / 4, limits.transfer_grace_s / 4)
    checked_at = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now = time.monotonic()
        # A longer pause means that this process was suspended or busy, for which clients are not to blame.
        seconds = min(now - checked_at, 2 * interval_s)
        for connection in list(connections):
            connection.check(seconds)
        close_idle(connections, limits)
        checked_at = now


def close_idle(connections: Collection[BoundedProtocol], limits: GatewayConfig) -> None:
    """Closes the connections that are idle for longest, down to `max_idle_connections`."""
    idle = [(seconds, one) for one in connections if (seconds := one.idle_s()) is not None]
    num_above = len(idle) - limits.max_idle_connections
    if num_above > 0:
        for seconds, connection in sorted(idle, key=itemgetter(0), reverse=True)[:num_above]:
            if seconds >= _IDLE_S:
                connection.timeout_keep_alive_handler()
