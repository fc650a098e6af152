"""A request that may have killed other samplers has this one to itself, whoever sends the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sampler_service.core import room as module
from sampler_service.core.room import Room
from tests.support.waiting import until
from tests.unit.sampler_service.conftest import Service
from tests.unit.sampler_service.serving import prompt, sample, slow_down
from tinsmith.errors import NotReady, OutOfCapacity, ServiceError
from tinsmith.rpc.auth import ALONE
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import sampler_pb2 as pb


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.0)


@asynccontextmanager
async def waits_alone(room: Room) -> AsyncIterator[asyncio.Event]:
    """A request that wants the room for itself, until the block ends. The event is set once it has."""
    has_it = asyncio.Event()

    async def run() -> None:
        async with room.alone():
            has_it.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    yield has_it
    task.cancel()
    await asyncio.wait([task])


def no_one_is_taken_away(error: ServiceError) -> None:
    pytest.fail("it had to wait")


async def test_it_waits_for_those_in_work_and_those_that_come_are_refused() -> None:
    room = Room(no_one_is_taken_away)
    room.enter()
    async with waits_alone(room) as has_it:
        with pytest.raises(OutOfCapacity, match="runs a request alone"):
            async with room.beside_others():
                pass
        assert not has_it.is_set()
        room.leave()
        await asyncio.wait_for(has_it.wait(), 10)
        with pytest.raises(OutOfCapacity, match="runs a request alone"):
            async with room.beside_others():
                pass
        with pytest.raises(OutOfCapacity, match="the turn of other requests"):
            async with room.alone():
                pass
    async with room.beside_others():
        pass


async def test_after_one_that_ran_alone_refused_others_have_time_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(no_one_is_taken_away)
    async with room.alone():
        pass
    async with room.alone():  # nobody was refused
        with pytest.raises(OutOfCapacity):
            async with room.beside_others():
                pass
    with pytest.raises(OutOfCapacity, match="the turn of other requests"):
        async with room.alone():
            pass
    async with room.beside_others():
        pass
    monkeypatch.setattr(module, "OTHERS_S", 0.0)
    room = Room(no_one_is_taken_away)
    for _ in range(2):
        async with room.alone():
            with pytest.raises(OutOfCapacity):
                async with room.beside_others():
                    pass


async def test_long_work_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    errors: list[ServiceError] = []
    room = Room(errors.append)
    room.enter()
    async with waits_alone(room) as has_it:
        await until(lambda: errors)
        assert isinstance(errors[0], NotReady)
        assert not has_it.is_set()
        room.leave(cancelled=True)
        await asyncio.wait_for(has_it.wait(), 10)


async def test_the_last_step_of_a_cancelled_request_counts_as_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.2)
    room = Room(no_one_is_taken_away)
    room.enter()
    async with waits_alone(room) as has_it:
        room.leave(cancelled=True)
        await asyncio.sleep(0.02)
        assert not has_it.is_set()
        await asyncio.wait_for(has_it.wait(), 10)


@pytest.mark.parametrize("is_patient", [True, False])
async def test_a_sampler_confirms_that_a_call_is_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    slow_down(service.engine, monkeypatch)
    if not is_patient:
        monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    requests = service.engine.requests
    tokens = prompt(8, vocab_size=200)
    long = asyncio.ensure_future(service.stub.Sample(sample(tokens, max_tokens=30 if is_patient else 240)))
    await until(lambda: len(requests) == 1)
    alone: Any = service.stub.StreamSample(
        pb.StreamSampleRequest(request=sample(tokens, max_tokens=20)), metadata=(ALONE,)
    )
    confirmed = asyncio.ensure_future(alone.initial_metadata())
    await until(lambda: requests.room._is_closed)
    assert not confirmed.done()
    for refused in (service.stub.Sample(sample(tokens)), service.stub.Tokenize(pb.TokenizeRequest(text="a"))):
        with pytest.raises(Exception, match="runs a request alone") as caught:
            await refused
        assert isinstance(from_rpc_error(caught.value), OutOfCapacity)  # type: ignore[arg-type]
    assert ALONE in tuple(await confirmed)
    assert long.done() or len(requests) <= 1
    assert [piece async for piece in alone][-1].HasField("result")
    if is_patient:
        assert (await long).sequences
    else:
        # The channel of this test sends it again by itself, and it is refused.
        with pytest.raises(Exception, match=r"runs a request alone, .* send this one again"):
            await long
    assert (await service.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=())).tokens
    monkeypatch.setattr(requests.room, "_others_until", 0.0)
    text: Any = service.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=(ALONE,))
    assert (await text).tokens
    assert ALONE in tuple(await text.initial_metadata())
