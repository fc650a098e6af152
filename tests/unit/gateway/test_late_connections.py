"""Connections that are being accepted while a gateway stops."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from contextlib import ExitStack, suppress

from tests.unit.gateway.stack import Stack


def connect_again_and_again(port: int, over: threading.Event) -> None:
    """Without a word; the last ones stay open."""
    open_ones: deque[socket.socket] = deque()
    while not over.is_set():
        with suppress(OSError):
            open_ones.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        if len(open_ones) > 20:
            open_ones.popleft().close()
    with ExitStack() as sockets:
        for one in open_ones:
            sockets.enter_context(one)
        for one in open_ones:
            with suppress(ConnectionResetError):  # of one that was never accepted
                assert one.recv(1) == b"", "the gateway closes it"


async def test_they_do_not_hold_up_the_stop(stack: Stack) -> None:
    for _ in range(5):
        over = threading.Event()
        connecting = asyncio.create_task(asyncio.to_thread(connect_again_and_again, stack.port, over))
        await asyncio.sleep(0.05)
        await stack.stop_gateway()  # "timeout graceful shutdown exceeded" would be an error in the log
        over.set()
        await connecting
        await stack.start_gateway()
