"""Slow, large and many connections: each is ended, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
import zstandard

from gateway.http import connections
from gateway.http.server import allow_descriptors
from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, batch

HEADERS_S = 0.4
GRACE_S = 0.6
LIMIT_S = 20.0
"""A hang ends the test; nothing here is timed."""

QUICK = {"header_timeout_s": HEADERS_S, "transfer_grace_s": GRACE_S}
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection(stack: Stack) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, until the other side has closed."""
    for position in range(len(data)):
        if writer.transport.is_closing():
            return
        writer.write(data[position : position + 1])
        await asyncio.sleep(0.05)


async def ending(connection: Connection, data: bytes) -> bytes:
    """The answer up to the end of the connection, while `data` is sent slowly."""
    reader, writer = connection
    sending = asyncio.create_task(trickle(writer, data))
    try:
        async with asyncio.timeout(LIMIT_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


SLOW = {
    "says nothing": (b"", b"", b"408"),
    "slow headers": (b"GET /api/v1/healthz HTTP/1.1\r\n", b"X-Slow: " + b"a" * 4000, b"408"),
    "slow body": (POST + b"Content-Length: 4000\r\n\r\n", b"{" + b" " * 3999, b"408"),
    "slow chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 900, b"408"),
    # Nobody reads the body of a path that does not exist: it is answered, and cut off all the same.
    "unread body": (b"POST /no HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n", b" " * 4000, b"404"),
}
"""Bytes that are sent at once, bytes that are sent slowly, and the status of the answer."""


@pytest.mark.gateway(**QUICK, min_transfer_bytes_s=1000)
async def test_a_slow_client_is_cut_off_and_others_are_served(stack: Stack, client: Client) -> None:

    async def status_of(begin: bytes, rest: bytes) -> bytes:
        async with connection(stack) as slow:
            slow[1].write(begin)
            return (await ending(slow, rest)).split(b" ")[1]

    slow = [asyncio.create_task(status_of(begin, rest)) for begin, rest, _ in SLOW.values()]
    while not all(task.done() for task in slow):
        await client.session()
    statuses = dict(zip(SLOW, [task.result() for task in slow], strict=True))
    assert statuses == {name: status for name, (_, _, status) in SLOW.items()}


@pytest.mark.gateway(**QUICK)
async def test_a_new_connection_may_be_silent_for_longer_than_headers_may_take(stack: Stack) -> None:
    """A client that was short of processor time opened hundreds of connections, had all of them closed before it wrote
    to one, and opened them again for ever."""
    async with connection(stack) as silent, connection(stack) as begun:
        begun[1].write(b"G")
        async with asyncio.timeout(LIMIT_S):
            assert b" 408 " in await begun[0].readline()
        silent[1].write(HEALTH)
        async with asyncio.timeout(LIMIT_S):
            assert b" 200 " in await silent[0].readline()


@pytest.mark.gateway(**QUICK)
async def test_empty_lines_do_not_keep_a_connection(stack: Stack) -> None:
    async with connection(stack) as slow:
        slow[1].write(HEALTH)
        answer = await slow[0].readuntil(b"\r\n")
        assert b" 200 " in answer
        assert b" 408 " in await ending(slow, b"\r\n" * 2000)


@pytest.mark.gateway(**QUICK, min_transfer_bytes_s=10**9)
async def test_a_client_that_does_not_read_its_answer_is_cut_off(stack: Stack, client: Client) -> None:
    """Answers larger than what the system buffers would lie in this process until it has read them."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(narrow, ("127.0.0.1", stack.port))
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert stack.server is not None
    ours = stack.server.server_state.connections
    with narrow:
        await until(lambda: ours, limit_s=LIMIT_S)
        (slow,) = ours
        async with asyncio.timeout(LIMIT_S):
            while slow in ours:
                with suppress(BlockingIOError, ConnectionError):
                    narrow.send(ask)
                await asyncio.sleep(0.01)
    await client.session()


async def test_an_answer_that_many_clients_do_not_read_is_not_copied_for_each(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of ten clients held 54 MB of an answer of 8 MB."""
    answer = bytes(range(256)) * 2**15
    monkeypatch.setattr("gateway.http.app._document", lambda: answer)
    loop = asyncio.get_running_loop()
    assert stack.server is not None
    narrow = [socket.socket() for _ in range(10)]
    try:
        for each in narrow:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.setblocking(False)
            await loop.sock_connect(each, ("127.0.0.1", stack.port))
            await loop.sock_sendall(each, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(20):
            await client.session()
        connections = stack.server.server_state.connections
        assert sum(each.transport.get_write_buffer_size() for each in connections) < len(answer)
    finally:
        for each in narrow:
            each.close()
    assert (await client.get("/openapi.json")).content == answer


@pytest.mark.gateway(**QUICK, min_transfer_bytes_s=1000)
async def test_a_body_in_pieces_that_comes_fast_enough_is_taken(client: Client) -> None:
    """Longer than the grace, as a large upload over a slow line does."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"type": "create_session", "tags": []'
        for _ in range(12):
            yield b" " * 400
            await asyncio.sleep(GRACE_S / 6)
        yield b"}"

    reply = await client.post("/api/v1/create_session", content=pieces())
    assert reply.status_code == 200


@pytest.mark.gateway(max_header_bytes=8000)
async def test_headers_above_the_limit_are_refused(stack: Stack, client: Client) -> None:
    for headers, end, pieces in itertools.product(
        (b"X: " + b"a" * 9000, b"X: y\r\n" * 2000), (b"", b"\r\n\r\n"), (1, 3)
    ):
        data = b"GET /api/v1/healthz HTTP/1.1\r\n" + headers + end
        size = -(-len(data) // pieces)
        async with connection(stack) as (reader, writer), asyncio.timeout(LIMIT_S):
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await asyncio.sleep(0.02)
            assert b" 431 " in await reader.readline()
            assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
    assert (await client.get("/api/v1/healthz", headers={"x-large": "a" * 7000})).status_code == 200


@pytest.mark.gateway(max_connections=16)
async def test_connections_above_the_limit_are_closed_and_those_below_live(stack: Stack) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(16)]
    try:
        async with connection(stack) as (reader, _), asyncio.timeout(LIMIT_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        for reader, writer in opened:
            writer.write(HEALTH)
            async with asyncio.timeout(LIMIT_S):
                assert b" 200 " in await reader.readuntil(b"\r\n")
    finally:
        for _, writer in opened:
            writer.transport.abort()


@pytest.mark.gateway(max_connections=16)
@pytest.mark.parametrize("doing", ["nothing", "headers", "requests"])
async def test_one_address_cannot_keep_others_out(stack: Stack, doing: str) -> None:
    """Nor does it keep them out when each of its connections has a request in work."""
    assert stack.server is not None
    connected = stack.server.server_state.connections
    with ExitStack() as opened:

        def hog() -> socket.socket:
            return opened.enter_context(
                socket.create_connection(("127.0.0.1", stack.port), source_address=("127.0.0.2", 0))
            )

        for _ in range(20):
            one = hog()
            if doing != "nothing":
                one.send(b"POST /api/v1/heartbeat HTTP/1.1\r\nHost: localhost\r\n")
            if doing == "requests":
                one.send(b"content-length: 1000\r\n\r\n")
        await until(lambda: len(connected) == 16)
        async with connection(stack) as mine, connection(stack) as other:
            for reader, writer in (mine, other):
                writer.write(HEALTH)
                async with asyncio.timeout(LIMIT_S):
                    assert b" 200 " in await reader.readuntil(b"\r\n")
            late = hog()
            late.setblocking(False)
            async with asyncio.timeout(LIMIT_S):
                with suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(late, 1) == b""
            assert len(connected) == 16


async def test_idle_connections_above_the_limit_are_closed_the_longest_idle_first(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_IDLE_S", 0.0)
    await stack.restart_gateway(max_idle_connections=2)
    opened = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(5)]
    try:
        async with asyncio.timeout(LIMIT_S):
            for reader, writer in opened[::-1]:
                writer.write(HEALTH)
                assert b" 200 " in await reader.readuntil(b"}")
                await asyncio.sleep(0.05)
            for reader, _ in opened[2:]:
                assert await reader.read() == b""
            for reader, writer in opened[:2]:
                writer.write(HEALTH)
                assert b" 200 " in await reader.readuntil(b"\r\n")
    finally:
        for _, writer in opened:
            writer.transport.abort()


@pytest.mark.gateway(max_idle_connections=0, header_timeout_s=0.04)  # which looks at all in each 0.01 s
async def test_no_connection_is_closed_soon_after_its_last_request(stack: Stack) -> None:
    async with connection(stack) as (reader, writer), asyncio.timeout(LIMIT_S):
        for _ in range(2):
            writer.write(HEALTH)
            assert b" 200 " in await reader.readuntil(b"}")
            await asyncio.sleep(0.2)
        assert not reader.at_eof()


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_no_error(stack: Stack, client: Client) -> None:
    """The fixture looks into the log."""
    for begin in (POST + b"Content-Length: 100\r\n\r\n{", POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        async with connection(stack) as (_, writer):
            writer.write(begin)
            await writer.drain()
    await client.session()


async def test_bytes_that_are_not_http_are_refused(stack: Stack) -> None:
    for body in (b"not HTTP\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 100):
        async with connection(stack) as (reader, writer):
            writer.write(body)
            async with asyncio.timeout(LIMIT_S):
                assert b" 400 " in await reader.readline()


async def test_a_body_that_says_two_lengths_is_refused(stack: Stack) -> None:
    """Request smuggling: this server and a proxy before it must not read two different requests."""
    for extra in (
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    ):
        async with connection(stack) as (reader, writer):
            writer.write(POST + extra + b"\r\n0\r\n\r\n")
            async with asyncio.timeout(LIMIT_S):
                assert b" 400 " in await reader.readline()


@pytest.mark.gateway(max_body_bytes=10_000)
async def test_chunked_bodies_have_the_same_limit(client: Client) -> None:

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    reply = await client.post("/api/v1/create_session", content=pieces())
    assert reply.status_code == 413
    assert "max_body_bytes is 10000" in reply.json()["detail"]


@pytest.mark.gateway(max_body_bytes=2**20)
async def test_a_zstd_bomb_is_refused(client: Client) -> None:
    model_id = await client.model(await client.session())
    plain = batch(model_id, 1).SerializeToString() + b"\x00" * 2**26
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    for says_its_size in (True, False):
        compressor = zstandard.ZstdCompressor(level=1, write_content_size=says_its_size).compressobj(
            size=len(plain) if says_its_size else -1
        )
        bomb = compressor.compress(plain) + compressor.flush()
        assert len(bomb) < 2**20
        reply = await client.post("/api/v1/forward_backward", content=bomb, headers=headers)
        if says_its_size:  # its ids could be read: it fails as this operation of the model
            assert "max_body_bytes is 1048576" in (await client.result(reply.json()))["error"]
        else:
            assert (reply.status_code, "max_body_bytes" in reply.json()["detail"]) == (400, True)


async def test_a_frame_that_asks_for_a_large_window_is_refused(client: Client) -> None:
    """Its header makes the decoder take memory before there is anything to decode."""
    magic, no_size_window_2_gib = b"\x28\xb5\x2f\xfd", b"\x00\xa8"
    frame = magic + no_size_window_2_gib + b"\x01\x00\x00"
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    reply = await client.post("/api/v1/forward_backward", content=frame, headers=headers)
    assert reply.status_code == 400


async def test_json_nested_without_end_is_refused(client: Client) -> None:
    for depth in (1_000, 1_000_000):
        for body in (b"[" * depth, b'{"a":' * depth, b'{"a":' + b"[" * depth + b"]" * depth + b"}"):
            reply = await client.post("/api/v1/create_session", content=body)
            if depth == 1_000:
                assert reply.status_code == 400
                assert "the body is not JSON" in reply.json()["detail"]
            else:  # it holds too much to be parsed at all
                assert reply.status_code == 413
                assert "max_body_values" in reply.json()["detail"]


@pytest.mark.gateway(max_sessions=2)
async def test_sessions_of_one_owner_are_limited_and_a_repeat_is_no_new_one(client: Client) -> None:
    body, key = {"type": "create_session"}, {"x-idempotency-key": "one"}
    first = (await client.post("/api/v1/create_session", json=body, headers=key)).json()["session_id"]
    await client.session()
    refused = await client.post("/api/v1/create_session", json=body)
    assert (refused.status_code, "max_sessions is 2" in refused.json()["detail"]) == (429, True)
    again = await client.post("/api/v1/create_session", json=body, headers=key)
    assert again.json()["session_id"] == first
    finish = {"reason": {"type": "success"}}
    assert (await client.post(f"/api/v1/sessions/{first}/finish", json=finish)).status_code == 200
    await client.session()


async def test_sampling_sessions_of_one_owner_are_limited_and_a_repeat_is_no_new_one(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.database.sessions._FULL_S", 0.0)
    await stack.restart_gateway(max_sampling_sessions=3, ended_session_retention_s=0.001)
    session_id = await client.session()
    model_id = await client.model(session_id)
    samplers = [await client.sampling_session(session_id, seq=n) for n in range(2)]
    save = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 2}
    assert (await client.result(await client.call("save_weights_for_sampler", save)))["sampling_session_id"]
    body = {"session_id": session_id, "sampling_session_seq_id": 9, "base_model": BASE_MODEL}
    refused = await client.call("create_sampling_session", body, status=429)
    assert "'local' has 3 sampling sessions, which is max_sampling_sessions" in refused["detail"]
    failed = await client.result(
        await client.call("save_weights_for_sampler", save | {"seq_id": 2, "sampling_session_seq_id": 3})
    )
    assert "max_sampling_sessions" in failed["error"]
    without = {"base_model": BASE_MODEL, "prompt": {"chunks": []}, "sampling_params": {}, "num_samples": 1}
    await client.call("asample", without, status=429)
    assert await client.sampling_session(session_id, seq=1) == samplers[1]
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await asyncio.sleep(0.01)
    await stack.gateway.reaper.forgetting.forget()
    await client.sampling_session(await client.session(), seq=0)


def test_the_limit_of_open_files_is_raised_and_said_where_it_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        allow_descriptors(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(856, before[1])
        assert caplog.text == ""
        allow_descriptors(before[1])
        assert "max_connections" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
