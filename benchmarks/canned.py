"""A stand-in for a service, which does nothing: it asks the real one once for each answer and repeats that at once.
A sample has the first one's result, under its own id, and is reported as complete as soon as it has come.

    python benchmarks/canned.py http://127.0.0.1:8000

A client's costs against it are the client's own. Shared by sdk_floor.py, which measures that, and by a test,
which holds that the SDK takes what it says for answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ASK_S = 60.0
_SAMPLE = b"the result of a sample"


def _end(received: bytes) -> int | None:
    """Position after the first HTTP message in these bytes; None while it is incomplete."""
    if (head_end := received.find(b"\r\n\r\n")) < 0:
        return None
    length = _LENGTH.search(received, 0, head_end)
    if length is None and b"transfer-encoding" in received[:head_end].lower():
        raise ValueError(f"only bodies with a content-length are understood: {received[:head_end]!r}")
    end = head_end + 4 + (int(length[1]) if length else 0)
    return end if len(received) >= end else None


def _with_body(answer: bytes, body: bytes) -> bytes:
    """An answer with the headers of `answer` and another body."""
    head = answer[: answer.find(b"\r\n\r\n") + 4]
    return _LENGTH.sub(b"\r\ncontent-length: %d" % len(body), head, count=1) + body


class CannedAnswers:
    """Answers of the real service, with their headers, by request line. Those of retrieve_future are told apart by the
    body, too, but all samples have one answer.

    So each submission of a kind gets the id of the first submission of this kind, and with it the first one's result.
    The SDK tells samples apart, so each sample has an id of its own.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._known: dict[bytes, bytes] = {}
        self._samples: defaultdict[str, list[str]] = defaultdict(list)
        """Ids of the samples that have arrived, by the client that waits for them."""
        self._polls: list[Callable[[], None]] = []
        """Polls of clients without a sample in work. Each is answered when the next sample arrives."""

    def to(self, request: bytes, send: Callable[[bytes], None]) -> None:
        """Answers at once, or, for a poll, later."""
        line, _, rest = request.partition(b"\r\n")
        body = rest[rest.find(b"\r\n\r\n") + 4 :]
        if b"/asample " in line:
            send(self._receipt(line, request, json.loads(body)))
            polls, self._polls = self._polls, []
            for answer in polls:
                answer()
        elif b"/retrieve_futures " in line:
            self._report(json.loads(body), send)
        elif b"/retrieve_future " in line:
            send(self._repeated(_SAMPLE if b":sample:" in body else line + body, request))
        else:
            send(self._repeated(line, request))

    def _receipt(self, line: bytes, request: bytes, sample: dict[str, Any]) -> bytes:
        first = self._repeated(line, request)
        body = first[first.find(b"\r\n\r\n") + 4 :]
        request_id = f"{sample['sampling_session_id']}:{sample['seq_id']}"
        self._samples[sample["sampling_session_id"]].append(request_id)
        return _with_body(first, body.replace(json.loads(body)["request_id"].encode(), request_id.encode()))

    def _report(self, poll: dict[str, Any], send: Callable[[bytes], None]) -> None:
        """Answers a poll with the complete samples, once there is one that the client does not know."""
        samples = self._samples[poll["target"]["sampling_session_id"]]
        known = poll["prev_cursor"]
        if known == len(samples) and poll.get("timeout") != 0:
            self._polls.append(lambda: self._report(poll, send))
            return
        size = len(self._known.get(_SAMPLE, b""))  # of the first none is known, and the SDK asks for it
        completions = [
            {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}
            for request_id in samples[known:]
        ]
        body = json.dumps({"completions": completions, "cursor": len(samples)}).encode()
        send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    def _repeated(self, key: bytes, request: bytes) -> bytes:
        """The real service's first answer to a request of this kind."""
        if (answer := self._known.get(key)) is None:
            answer = self._ask(request)
            if answer.startswith(b"HTTP/1.1 200") and b'"try_again"' not in answer:
                self._known[key] = answer
        return answer

    def _ask(self, request: bytes) -> bytes:
        """Blocks the event loop, which does not matter before anything is measured."""
        with socket.create_connection(self._address, timeout=_ASK_S) as connection:
            connection.sendall(request)
            answer = b""
            while (end := _end(answer)) is None:
                if not (more := connection.recv(1 << 16)):
                    raise ConnectionError(f"the service closed the connection in its answer to {request!r}")
                answer += more
        return answer[:end]


class Connection(asyncio.Protocol):
    def __init__(self, answers: CannedAnswers) -> None:
        self._answers = answers
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := _end(self._received)) is not None:
            request, self._received = self._received[:end], self._received[end:]
            self._answers.to(request, self._transport.write)


@contextmanager
def stand_in(url: str) -> Iterator[tuple[str, int]]:
    """Starts a stand-in for the service at `url`. Yields the stand-in's URL and process id."""
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
    answers = CannedAnswers(url)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
