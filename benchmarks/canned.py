"""A stand-in for a service, which does nothing: it asks the real one once for each answer and repeats that at once.

    python benchmarks/canned.py http://127.0.0.1:8000

What a client costs against it, the client costs by itself. Shared by bench_sdk_floor.py, which measures that, and by a
test, which holds that the SDK takes what it says for answers.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from urllib.parse import urlsplit

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ASK_S = 60.0


def _end(received: bytes) -> int | None:
    """Where the first HTTP message of these bytes ends; None while it is incomplete."""
    if (head_end := received.find(b"\r\n\r\n")) < 0:
        return None
    length = _LENGTH.search(received, 0, head_end)
    if length is None and b"transfer-encoding" in received[:head_end].lower():
        raise ValueError(f"only bodies with a content-length are understood: {received[:head_end]!r}")
    end = head_end + 4 + (int(length[1]) if length else 0)
    return end if len(received) >= end else None


class Answers:
    """The real service's, with their headers, by request line; those of retrieve_future also by what is asked for.

    So each submission of a kind has the id of the first one, and with it that one's result.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._known: dict[bytes, bytes] = {}

    def to(self, request: bytes) -> bytes:
        key = request[: request.find(b"\r\n")]
        if b"/retrieve_future " in key:
            key += request[request.find(b"\r\n\r\n") :]
        if (answer := self._known.get(key)) is None:
            answer = self._ask(request)
            if answer.startswith(b"HTTP/1.1 200") and b'"try_again"' not in answer:
                self._known[key] = answer
        return answer

    def _ask(self, request: bytes) -> bytes:
        """Blocks the event loop, as it is done before anything is measured."""
        with socket.create_connection(self._address, timeout=_ASK_S) as connection:
            connection.sendall(request)
            answer = b""
            while (end := _end(answer)) is None:
                if not (more := connection.recv(1 << 16)):
                    raise ConnectionError(f"the service closed the connection in its answer to {request!r}")
                answer += more
        return answer[:end]


class Connection(asyncio.Protocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := _end(self._received)) is not None:
            request, self._received = self._received[:end], self._received[end:]
            self._transport.write(self._answers.to(request))


@contextmanager
def stand_in(url: str) -> Iterator[tuple[str, int]]:
    """For the service there; its own URL and process id."""
    process = subprocess.Popen([sys.executable, __file__, url], stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        with process.stdout as lines:
            if not (own := lines.readline().strip()):
                raise RuntimeError("the stand-in ended before it was ready; its error is above")
            yield own, process.pid
    finally:
        process.terminate()
        process.wait()


async def _serve(url: str) -> None:
    answers = Answers(url)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
