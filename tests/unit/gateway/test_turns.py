"""Requests that come by the hundred begin a few at a time, and what they hold up is little."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from gateway.http.middleware import InTurn
from gateway.load import Pacer, Receiving, Turns
from tests.support.waiting import until
from tests.unit.gateway.stack import Client, Stack, batch, sample_body
from tinsmith.v1 import sampler_pb2

NUM_SAMPLES = 100
LIMIT_S = 60.0
"""A hang ends the test; nothing here is timed."""


async def test_turns_come_in_order_a_few_in_each_pass() -> None:
    pacer, begun = Pacer(per_pass=3), list[int]()

    async def one(number: int) -> None:
        await pacer.turn()
        begun.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(10)]
    num_begun = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)  # a pass
        num_begun.append(len(begun))
    assert begun == list(range(10))
    assert max(after - before for before, after in itertools.pairwise(num_begun)) <= 3


async def test_owners_take_turns_whatever_one_has_waiting() -> None:
    pacer, begun = Pacer(per_pass=1), list[str]()

    async def one(owner: str) -> None:
        await pacer.turn(owner)
        begun.append(owner)

    owners = ["ada"] * 1000 + ["bob"] * 3 + ["eve"]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(one(owner) for owner in owners))
    assert begun[1:8] == ["ada", "bob", "eve", "ada", "bob", "ada", "bob"]
    assert begun[8:] == ["ada"] * 996
    assert not pacer._waiting


async def test_a_waiter_that_gives_up_costs_the_others_no_turn() -> None:
    pacer = Pacer(per_pass=1)
    tasks = [asyncio.create_task(pacer.turn()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[1:19]:
        task.cancel()
    async with asyncio.timeout(LIMIT_S):
        await tasks[0]
        await tasks[19]
    await pacer.turn()  # and later ones begin anew
    assert sum(task.cancelled() for task in tasks) == 18


async def test_a_failure_keeps_nobody_from_its_turn() -> None:
    pacer, num_begun = Pacer(per_pass=2), 0

    async def fail() -> None:
        nonlocal num_begun
        await pacer.turn()
        num_begun += 1
        raise ValueError

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(fail() for _ in range(9)), return_exceptions=True)
    assert num_begun == 9


async def test_one_large_body_at_a_time_and_owners_take_turns() -> None:
    turns, begun, in_work = Turns(), list[str](), 0

    async def one(owner: str) -> None:
        nonlocal in_work
        async with turns.turn(owner):
            begun.append(owner)
            in_work += 1
            assert in_work == 1
            await asyncio.sleep(0)
            in_work -= 1

    owners = ["ada"] * 50 + ["bob"] * 3 + ["eve"]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(one(owner) for owner in owners))
        assert begun[1:8] == ["ada", "bob", "eve", "ada", "bob", "ada", "bob"]
        assert begun[8:] == ["ada"] * 46


async def test_a_large_body_is_followed_by_a_pause_as_long_as_its_work() -> None:
    turns, loop, times = Turns(), asyncio.get_running_loop(), list[float]()

    async def one() -> None:
        async with turns.turn("ada"):
            times.append(loop.time())
            await asyncio.sleep(0.05)
            times.append(loop.time())

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(one(), one())
    began, ended, next_began, _ = times
    assert next_began - ended >= (ended - began) * 0.99  # a timer may be early by the clock's resolution


async def test_few_large_bodies_of_an_owner_come_in_at_once() -> None:
    receiving, in_work, most = Receiving(at_once=3), Counter[str](), Counter[str]()

    async def one(owner: str) -> None:
        async with receiving.slot(owner):
            in_work[owner] += 1
            most[owner] = max(most[owner], in_work[owner])
            for _ in range(5):
                await asyncio.sleep(0)
            in_work[owner] -= 1

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(one(owner) for owner in ["ada"] * 20 + ["bob"] * 2))
    assert most == {"ada": 3, "bob": 2}


async def test_bodies_that_never_end_keep_none_of_their_owner_out() -> None:
    receiving = Receiving(at_once=2, longest_s=0.01)

    async def never_ends() -> None:
        async with receiving.slot("ada"):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(never_ends()) for _ in range(5)]
    async with asyncio.timeout(LIMIT_S), receiving.slot("ada"):
        pass
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(LIMIT_S), receiving.slot("ada"), receiving.slot("ada"):  # none was given back twice
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), receiving.slot("ada"):
                raise AssertionError("a third one")


async def test_a_body_whose_trainer_is_away_keeps_nobody_waiting() -> None:
    turns = Turns(longest_s=0.01)
    is_back = asyncio.Event()

    async def away() -> None:
        async with turns.turn("ada"):
            await is_back.wait()

    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(away())
        await asyncio.sleep(0)
        for owner in ("ada", "bob"):
            async with turns.turn(owner):
                assert not task.done()
        is_back.set()
        await task


async def test_a_body_whose_client_gives_up_costs_the_others_no_turn() -> None:
    turns = Turns()

    async def one() -> None:
        async with turns.turn("ada"):
            await asyncio.sleep(0)

    async with asyncio.timeout(LIMIT_S):
        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[1:10]:
            task.cancel()
        turns._waiting.wake()  # its turn comes at the same moment
        tasks[10].cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [end is None for end in ends] == [True] + [False] * 10 + [True] * 9
        await one()


def posted(path: str, body: dict[str, Any] | bytes, *, key: str = "tml-test") -> bytes:
    """`body`: bytes of a message of protobuf."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    form = "x-protobuf" if isinstance(body, bytes) else "json"
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\nContent-Length: {len(content)}"
    return f"{head}\r\nContent-Type: application/{form}\r\n\r\n".encode() + content


async def answered_first(stack: Stack, hundred: list[bytes], last: bytes) -> int:
    """How many of the hundred were answered before the last, which came after all of them."""
    answered: list[bool] = []

    async def answer(reader: asyncio.StreamReader, *, is_last: bool) -> bytes:
        status = await reader.readline()
        answered.append(is_last)
        return status

    async with AsyncExitStack() as opened:
        readers = []
        connections = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in (*hundred, last)]
        # All of it is there before the gateway, whose loop this is, looks at any of it.
        for (reader, writer), content in zip(connections, (*hundred, last), strict=True):
            opened.callback(writer.transport.abort)
            readers.append(reader)
            writer.write(content)
        async with asyncio.timeout(LIMIT_S):
            statuses = await asyncio.gather(
                *(answer(reader, is_last=False) for reader in readers[:-1]), answer(readers[-1], is_last=True)
            )
    assert {status.split()[1] for status in statuses} == {b"200"}
    return answered.index(True)


async def test_a_heartbeat_overtakes_samples_that_came_before_it(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    sampler_id = await client.sampling_session(session_id)
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))  # what is read once is read
    samples = [posted("asample", sample_body(sampler_id, 1 + number)) for number in range(NUM_SAMPLES)]
    heartbeat = posted("session_heartbeat", {"session_id": session_id})
    assert await answered_first(stack, samples, heartbeat) < NUM_SAMPLES / 2


async def test_a_sample_overtakes_those_of_another_owner_that_came_before_it(stack: Stack) -> None:
    keys = ("tml-ada", "tml-bob")
    await stack.restart_gateway(api_keys=[{"key": key} for key in keys])
    samplers = []
    for key in keys:
        async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) as client:
            samplers.append(await client.sampling_session(await client.session()))
            await client.result(await client.call("asample", sample_body(samplers[-1], 0)))
    hundred = [posted("asample", sample_body(samplers[0], 1 + n), key=keys[0]) for n in range(NUM_SAMPLES)]
    last = posted("asample", sample_body(samplers[1], 1), key=keys[1])
    assert await answered_first(stack, hundred, last) < NUM_SAMPLES / 2


async def begun_before(last: tuple[str, str | None], hundred: tuple[str, str]) -> int:
    """How many of a hundred requests began before the last, which came after all of them. Each is a path below /api/v1
    and an owner."""
    begun: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["is_last"])

    in_turn = InTurn(app, samples=Pacer())

    async def request(path: str, owner: str | None, *, is_last: bool) -> None:
        state = {} if owner is None else {"owner": owner}
        scope = {"type": "http", "path": f"/api/v1/{path}", "state": state, "is_last": is_last}
        await in_turn(scope, receive=Any, send=Any)

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(request(*hundred, is_last=False) for _ in range(100)), request(*last, is_last=True))
    assert len(begun) == 101
    return begun.index(True)


@pytest.mark.parametrize("path", ["optim_step", "forward_backward", "create_model", "asample", "retrieve_future"])
async def test_a_request_overtakes_those_of_another_owner_that_came_before_it(path: str) -> None:
    assert await begun_before((path, "bob"), (path, "ada")) < 10


async def test_an_owners_step_overtakes_the_samples_that_came_before_it() -> None:
    assert await begun_before(("optim_step", "ada"), ("asample", "ada")) < 10


@pytest.mark.parametrize(("path", "owner"), [("session_heartbeat", "ada"), ("healthz", None)])
async def test_heartbeats_and_health_checks_overtake_all_steps(path: str, owner: str | None) -> None:
    assert await begun_before((path, owner), ("optim_step", "ada")) < 10


async def test_requests_of_one_owner_begin_in_their_order() -> None:
    assert await begun_before(("optim_step", "ada"), ("forward_backward", "ada")) == 100


async def test_a_large_batch_overtakes_those_of_another_owner_that_came_before_it(stack: Stack) -> None:
    keys = ("tml-ada", "tml-bob")
    await stack.restart_gateway(api_keys=[{"key": key} for key in keys])
    requests = []
    for key, number in zip(keys, (10, 1), strict=True):
        async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) as client:
            model_id = await client.model(await client.session())
        for seq_id in range(1, 1 + number):
            message = batch(model_id, seq_id)
            message.data[0].model_input[0].encoded_text.tokens = bytes(2**20)
            requests.append(posted("forward_backward", message.SerializeToString(), key=key))
    turns = stack.gateway.turns
    turns.longest_s = LIMIT_S
    async with asyncio.timeout(LIMIT_S), turns.turn("eve"):  # until all bodies are read
        answers = asyncio.create_task(answered_first(stack, requests[:-1], requests[-1]))
        while sum(map(len, turns._waiting._owners.values())) < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await answers < 5


async def test_a_large_batch_has_its_turn_until_the_trainer_has_it(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    model_id = await client.model(await client.session())
    headers = {"content-type": "application/x-protobuf"}
    message = batch(model_id, 1)
    message.data[0].model_input[0].encoded_text.tokens = bytes(2**20)
    submitted, taken = gateway.training.operations.submit, list[bool]()

    async def submit(*args: Any) -> None:
        taken.append(gateway.turns.is_taken)
        await submitted(*args)
        taken.append(gateway.turns.is_taken)

    gateway.training.operations.submit = submit  # type: ignore[method-assign]
    body = message.SerializeToString()
    assert (await client.post("/api/v1/forward_backward", content=body, headers=headers)).status_code == 200
    assert taken == [True, True]


async def test_the_end_of_a_sample_overtakes_those_of_another_owner(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("tml-ada", "tml-bob")
    await stack.restart_gateway(api_keys=[{"key": key} for key in keys])
    assert stack.server is not None
    gateway, drawn, num_drawing, ended = stack.server.app.state.gateway, asyncio.Event(), 0, list[str]()
    ends = gateway.dashboard.samples.add

    async def draw(*_args: object) -> sampler_pb2.SampleResponse:
        nonlocal num_drawing
        num_drawing += 1
        await drawn.wait()  # all of them end in the same pass
        return sampler_pb2.SampleResponse()

    def note(request_id: str, *args: Any, **options: Any) -> None:
        ended.append(request_id.partition(":")[0])
        ends(request_id, *args, **options)

    monkeypatch.setattr("gateway.sampling.drawing.Drawing.run", draw)
    monkeypatch.setattr(gateway.dashboard.samples, "add", note)
    sessions = []
    for key, number in zip(keys, (NUM_SAMPLES, 1), strict=True):
        async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) as client:
            sessions.append(await client.session())
            sampler_id = await client.sampling_session(sessions[-1])
            for n in range(number):
                await client.call("asample", sample_body(sampler_id, n))
    await until(lambda: num_drawing > NUM_SAMPLES, limit_s=LIMIT_S)
    drawn.set()
    await until(lambda: len(ended) > NUM_SAMPLES, limit_s=LIMIT_S)
    assert ended.index(sessions[1]) < NUM_SAMPLES / 2


async def test_a_session_that_was_made_here_beats_without_a_query(stack: Stack, client: Client) -> None:
    asked: list[str] = []

    def note(_connection: object, _cursor: object, _statement: str, parameters: object, *_rest: object) -> None:
        asked.append(str(parameters))

    session_id = await client.session()
    event.listen(Engine, "before_cursor_execute", note)
    try:
        await client.call("session_heartbeat", {"session_id": session_id})
        assert not any(session_id in parameters for parameters in asked)
        await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
        assert any(session_id in parameters for parameters in asked)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    await client.call("session_heartbeat", {"session_id": session_id}, status=410)
