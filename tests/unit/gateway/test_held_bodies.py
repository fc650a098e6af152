"""Request bodies take a bounded number of bytes, however many clients send them and however long answers take."""

from __future__ import annotations

import gc
import struct
from contextlib import AsyncExitStack

import pytest
from grpc.aio._call import UnaryStreamCall
from pydantic import ValidationError

from gateway.config import GatewayConfig
from gateway.load import Receiving
from gateway.training.submission import Submission
from tests.support.waiting import until
from tests.unit.gateway.stack import Client, Stack, batch, sample_body
from tests.unit.gateway.test_connections import connection

BODY_BYTES = 256 * 2**10
NUM_HELD = 3
LIMITS = {"max_body_bytes": BODY_BYTES, "max_held_body_bytes": 2 * NUM_HELD * BODY_BYTES}
"""One owner may hold half of that."""
KEYS = [{"key": f"tml-{name}", "owner": name} for name in ("ada", "eve")]
HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: tml-test\r\nContent-Length: %d\r\n\r\n"
SESSION = b'{"tags":[]}'


async def until_held(stack: Stack, num_bytes: int) -> None:
    await until(lambda: stack.gateway.bodies.num_bytes == num_bytes)


@pytest.mark.gateway(**LIMITS)
async def test_bodies_above_the_bound_are_told_to_come_again_and_small_ones_go_on(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    body = SESSION.ljust(BODY_BYTES)
    async with AsyncExitStack() as clients:
        slow = [await clients.enter_async_context(connection(stack)) for _ in range(NUM_HELD)]
        for number, (_, writer) in enumerate(slow, start=1):
            writer.write(HEAD % len(body) + body[:-1])
            await until_held(stack, number * (len(body) - 1))
        late = await client.post("/api/v1/create_session", content=body)
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert "max_held_body_bytes" in late.json()["detail"]
        assert (await client.post("/v1/completions", content=body)).json()["error"]["type"] == "rate_limit_error"
        await client.call("session_heartbeat", {"session_id": session_id})
        await client.call("retrieve_future", {"request_id": "unknown"}, status=410)
        assert f"gateway_held_body_bytes {float(NUM_HELD * (len(body) - 1))}" in (await client.get("/metrics")).text
        for reader, writer in slow:
            writer.write(body[-1:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await until_held(stack, 0)
    assert (await client.post("/api/v1/create_session", content=body)).status_code == 200


@pytest.mark.gateway(**LIMITS, api_keys=KEYS)
async def test_an_owner_whose_bodies_never_end_keeps_no_other_owner_out(stack: Stack, client: Client) -> None:
    """Before, large bodies of other owners were told 429 until these bodies had ended."""
    body = SESSION.ljust(BODY_BYTES)
    head = HEAD.replace(b"tml-test", b"tml-eve") % len(body)
    async with AsyncExitStack() as clients:
        slow = [await clients.enter_async_context(connection(stack)) for _ in range(2 * NUM_HELD)]
        for number, (_, writer) in enumerate(slow, start=1):
            writer.write(head + body[:-1])
            await until_held(stack, min(number, NUM_HELD) * (len(body) - 1))
        late = await client.post("/api/v1/create_session", content=body, headers={"x-api-key": "tml-eve"})
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        other = await client.post("/api/v1/create_session", content=body, headers={"x-api-key": "tml-ada"})
        assert other.status_code == 200, other.text


@pytest.mark.gateway(max_body_bytes=BODY_BYTES, max_held_body_bytes=BODY_BYTES)
async def test_a_body_that_is_alone_may_take_the_whole_bound(stack: Stack, client: Client) -> None:
    reply = await client.post("/api/v1/create_session", content=SESSION.ljust(BODY_BYTES))
    assert reply.status_code == 200, reply.text


@pytest.mark.gateway(**LIMITS)
async def test_memory_of_a_body_whose_client_leaves_is_given_back(stack: Stack) -> None:
    async with connection(stack) as (_, writer):
        writer.write(HEAD % BODY_BYTES + b"{" * (BODY_BYTES // 2))
        await until_held(stack, BODY_BYTES // 2)
    await until_held(stack, 0)


async def test_a_body_is_not_read_while_others_of_its_owner_come_in(stack: Stack, client: Client) -> None:
    stack.gateway.receiving = Receiving(at_once=2, longest_s=1000)
    session_id = await client.session()
    body = SESSION.ljust(8 * BODY_BYTES)
    limit = stack.gateway.config.thread_body_bytes
    async with AsyncExitStack() as clients:
        first, second, third = [await clients.enter_async_context(connection(stack)) for _ in range(3)]
        for number, (_, writer) in enumerate((first, second), start=1):
            writer.write(HEAD % len(body) + body[:-1])
            await until_held(stack, number * (len(body) - 1))
        third[1].write(HEAD % len(body) + body[:-1])
        for _ in range(20):
            await client.call("session_heartbeat", {"session_id": session_id})
        assert stack.gateway.bodies.num_bytes <= 2 * (len(body) - 1) + 2 * limit, "a piece more than the limit"
        for reader, writer in (first, third, second):
            writer.write(body[-1:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_batch_is_not_kept_while_the_trainer_computes_it(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    message = batch(model_id, 1)
    message.data[0].model_input[0].encoded_text.tokens = struct.pack("<50000i", *range(50000))
    headers = {"content-type": "application/x-protobuf"}
    receipt = await client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
    assert stack.gateway.futures.pending(receipt.json()["request_id"]) is not None
    assert stack.gateway.bodies.num_bytes == 0
    objects = gc.get_objects()
    bodies = [each.body for each in objects if type(each) is Submission and each.model_id == model_id]
    assert bodies, "it waits"
    assert not any(bodies)
    calls = [each for each in objects if type(each) is UnaryStreamCall]
    requests = [each._request for each in calls if type(each._request) is list]  # others are messages, of health checks
    assert requests
    assert not any(requests)
    stack.trainer.go.set()
    assert isinstance(await client.result(receipt.json()), bytes)


@pytest.mark.gateway(**LIMITS)
async def test_a_sample_is_counted_until_it_is_drawn(stack: Stack, client: Client) -> None:
    sampler = await client.sampling_session(await client.session())
    stack.sampler.go.clear()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 60_000}]}
    receipts = [await client.call("asample", sample_body(sampler, n, prompt=prompt)) for n in range(2)]
    assert 480_000 < stack.gateway.bodies.num_bytes < 490_000
    assert (await client.call("asample", sample_body(sampler, 0, prompt=prompt))) == receipts[0], "a repeat"
    await client.call("asample", sample_body(sampler, 3, prompt=prompt), status=429)
    await client.call("asample", sample_body(sampler, 4))
    stack.sampler.go.set()
    for receipt in receipts:
        assert isinstance(await client.result(receipt), bytes)
    await until_held(stack, 0)
    await client.call("asample", sample_body(sampler, 3, prompt=prompt))


@pytest.mark.gateway(max_body_bytes=BODY_BYTES, max_held_body_bytes=2 * BODY_BYTES)
async def test_an_owners_only_sample_may_take_more_than_half(stack: Stack, client: Client) -> None:
    """While it is read, its body and its message are in memory, here two thirds of the bound."""
    sampler = await client.sampling_session(await client.session())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 60_000}]}  # 2 bytes each in JSON, 4 after that
    receipt = await client.call("asample", sample_body(sampler, 0, prompt=prompt))
    assert isinstance(await client.result(receipt), bytes)


@pytest.mark.gateway(**LIMITS)
async def test_a_sample_of_many_chunks_is_counted_for_what_they_take(stack: Stack, client: Client) -> None:
    """A chunk of one token has 10 bytes on the wire, and 74 in memory: 2,048 samples of 5,000 chunks, which counted for
    nothing, took 750 MB."""
    sampler = await client.sampling_session(await client.session())
    stack.sampler.go.clear()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}] * 5000}
    receipt = await client.call("asample", sample_body(sampler, 0, prompt=prompt))
    assert stack.gateway.bodies.num_bytes > 5000 * 74
    await client.call("asample", sample_body(sampler, 1, prompt=prompt), status=429)
    stack.sampler.go.set()
    assert isinstance(await client.result(receipt), bytes)


def test_a_bound_below_one_body_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_held_body_bytes 100 is below max_body_bytes 200"):
        GatewayConfig(max_body_bytes=200, max_held_body_bytes=100)
