"""The memory of messages that arrive at a gRPC server is bounded, however many clients send at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc.aio
import psutil
import pytest

from tests.support.waiting import until
from tests.unit.rpc import arriving_server
from tinsmith.errors import OutOfCapacity
from tinsmith.rpc import server
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.message_memory import BOUNDED, MessageMemory, is_taken_over
from tinsmith.rpc.server import Server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2

MB = 2**20
SAMPLE = "/tinsmith.v1.SamplerService/Sample"


def large(num_bytes: int) -> sampler_pb2.SampleRequest:
    tokens = types_pb2.EncodedText(tokens=bytes(num_bytes))
    return sampler_pb2.SampleRequest(prompt=[types_pb2.Chunk(encoded_text=tokens)])


@contextmanager
def arriving(message_bytes: int, num_together: int) -> Iterator[tuple[int, psutil.Process]]:
    """Port and process of arriving_server.py."""
    command = [sys.executable, "-m", arriving_server.__name__, str(message_bytes), str(num_together)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), psutil.Process(process.pid)
    finally:
        process.communicate(timeout=60)


async def growth(*, bounded: bool) -> tuple[int, int]:
    """By how many bytes the server's memory grows while 48 messages of 8 MB arrive at once, each on a connection of
    its own; and how many are answered.

    `bounded`: the clients say that they bound their messages themselves. Then the server has all of them at once.
    """
    body = large(8 * MB).SerializeToString()
    with arriving(9 * MB, 48 if bounded else 1) as (port, process):
        channels = [
            grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            )
            for _ in range(48)
        ]
        calls = [channel.unary_unary(SAMPLE) for channel in channels]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        before = most = process.memory_info().rss
        metadata = (BOUNDED,) if bounded else ()
        sent = asyncio.gather(*(call(body, metadata=metadata) for call in calls))
        while not sent.done():
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.002)
        answers = await sent
        for channel in channels:
            await channel.close()
    return most - before, len(answers)


@pytest.mark.slow
async def test_memory_is_bounded_while_many_large_messages_arrive() -> None:
    grown, num_answers = await growth(bounded=False)
    unbounded, _ = await growth(bounded=True)
    print(f"grew by {grown / MB:.0f} MB, and by {unbounded / MB:.0f} MB without the bound")
    assert num_answers == 48
    # Four messages of 8 MB, as gRPC and Python hold them, and 1 MB of each of the others.
    assert grown < 200 * MB
    assert unbounded > 48 * 8 * MB


@pytest.fixture
def memory() -> MessageMemory:
    return MessageMemory(200, message_bytes=100, wait_s=30.0)


async def test_a_call_gets_memory_in_its_turn_as_others_release_theirs(memory: MessageMemory) -> None:
    first, second = await memory.reserve(), await memory.reserve()
    waiting = [asyncio.create_task(memory.reserve()) for _ in range(3)]
    await asyncio.sleep(0)
    assert memory.num_bytes == 200
    first.shrink(60)  # its message is smaller than the largest, and still leaves no room for another one
    second.shrink(50)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    first.shrink(50)
    third = await waiting[0]
    assert [task.done() for task in waiting] == [True, False, False]
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    third.shrink(0)
    third.shrink(0)
    await waiting[2]
    assert memory.num_bytes == 200


async def test_a_call_that_waits_for_too_long_is_refused_and_leaves_the_queue() -> None:
    memory = MessageMemory(100, message_bytes=100, wait_s=0.01)
    reservation = await memory.reserve()
    with pytest.raises(OutOfCapacity, match="100 bytes of arriving messages, 100 of which are taken"):
        await memory.reserve()
    assert not memory.is_full
    reservation.shrink(0)
    assert memory.num_bytes == 0


async def test_memory_that_is_reserved_together_with_a_cancellation_is_released() -> None:
    memory = MessageMemory(100, message_bytes=100)
    reservation = await memory.reserve()
    waiting = asyncio.create_task(memory.reserve())
    await asyncio.sleep(0)
    reservation.shrink(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert memory.num_bytes == 0


# Over gRPC


class Services(sampler_pb2_grpc.SamplerServiceServicer, trainer_pb2_grpc.TrainerServiceServicer):
    """Handlers of each kind that wait for `go`, and count the requests that they have."""

    def __init__(self, *, takes_over: bool = False) -> None:
        self.go = asyncio.Event()
        self.num_begun = 0
        self.num_pieces = 0
        self._takes_over = takes_over

    async def _work(self) -> None:
        self.num_begun += 1
        if self._takes_over:
            is_taken_over()
        await self.go.wait()

    async def Sample(self, request: Any, context: Any) -> sampler_pb2.SampleResponse:
        await self._work()
        return sampler_pb2.SampleResponse()

    async def StreamSample(self, request: Any, context: Any) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        await self._work()
        yield sampler_pb2.StreamSampleResponse()

    async def ImportCheckpoint(self, requests: Any, context: Any) -> trainer_pb2.ImportCheckpointResponse:
        async for _ in requests:
            self.num_pieces += 1
        return trainer_pb2.ImportCheckpointResponse()


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch, services: Services, *, slow_s: float = 30.0, keys: bool = False
) -> AsyncIterator[tuple[grpc.aio.Channel, int]]:
    """A server with room for four messages of 1 MB, and a channel to it that does not bound its messages."""
    monkeypatch.setattr(server, "MAX_MESSAGE_BYTES", MB)
    monkeypatch.setattr(
        server,
        "MessageMemory",
        lambda most, *, message_bytes: MessageMemory(most, message_bytes=message_bytes, slow_s=slow_s),
    )
    settings = {"api_keys": ["tml-one", "tml-service"], "admin_keys": ["tml-service"]} if keys else {}
    made = Server("127.0.0.1:0", [sampler_pb2.DESCRIPTOR, trainer_pb2.DESCRIPTOR], **settings)
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(services, made.grpc)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(services, made.grpc)
    await made.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{made.port}") as channel:
        yield channel, made.port
    await made.stop(0)


LARGE = large(900_000)


async def test_a_large_message_has_its_room_until_its_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    async with serving(monkeypatch, services) as (channel, _):
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        calls = [stub.Sample(LARGE) for _ in range(6)]
        await until(lambda: services.num_begun >= 4)
        await asyncio.sleep(0.1)
        assert services.num_begun == 4
        services.go.set()
        await asyncio.gather(*calls)
        assert services.num_begun == 6


async def test_a_service_that_counts_the_memory_itself_frees_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(takes_over=True)
    async with serving(monkeypatch, services) as (channel, _):
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        calls = [stub.Sample(LARGE) for _ in range(6)]
        await until(lambda: services.num_begun == 6)
        services.go.set()
        await asyncio.gather(*calls)


async def test_calls_of_a_client_that_bounds_its_messages_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    async with serving(monkeypatch, services) as (_, port), connect(f"127.0.0.1:{port}") as channel:
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        calls = [stub.Sample(LARGE) for _ in range(6)]
        await until(lambda: services.num_begun == 6)
        services.go.set()
        await asyncio.gather(*calls)


@pytest.mark.parametrize(("key", "num_begun"), [("tml-one", 4), ("tml-service", 6)])
async def test_only_the_service_key_is_believed(monkeypatch: pytest.MonkeyPatch, key: str, num_begun: int) -> None:
    services = Services()
    async with (
        serving(monkeypatch, services, keys=True) as (_, port),
        connect(f"127.0.0.1:{port}", api_key=key) as channel,
    ):
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        calls = [stub.Sample(LARGE) for _ in range(6)]
        await until(lambda: services.num_begun >= num_begun)
        await asyncio.sleep(0.1)
        assert services.num_begun == num_begun
        services.go.set()
        await asyncio.gather(*calls)


async def test_small_messages_and_streams_take_turns_and_keep_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    async with serving(monkeypatch, services) as (channel, _):
        sampler: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        trainer: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        calls = [sampler.Sample(sampler_pb2.SampleRequest()) for _ in range(20)]
        streams = [sampler.StreamSample(sampler_pb2.StreamSampleRequest()) for _ in range(20)]
        await until(lambda: services.num_begun == 40)
        await trainer.ImportCheckpoint(iter([trainer_pb2.ImportCheckpointRequest(archive=bytes(900_000))] * 20))
        assert services.num_pieces == 20
        services.go.set()
        await asyncio.gather(*calls)
        for stream in streams:
            assert [answer async for answer in stream] == [sampler_pb2.StreamSampleResponse()]


async def test_who_sends_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    services.go.set()
    async with serving(monkeypatch, services, slow_s=0.05) as (channel, _):
        silent = [channel.stream_unary(SAMPLE)() for _ in range(4)]
        for call in silent:
            await call.wait_for_connection()
        await asyncio.sleep(0.2)
        assert not any(call.done() for call in silent)  # nobody waits for the room
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        await stub.Sample(LARGE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await next(call for call in silent if call.done())
        assert isinstance(error := from_rpc_error(caught.value), OutOfCapacity)
        assert "has not arrived within 0.05 s" in error.message


async def test_calls_that_are_cancelled_give_their_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    async with serving(monkeypatch, services) as (channel, _):
        silent = [channel.stream_unary(SAMPLE)() for _ in range(6)]
        for call in silent:
            await call.wait_for_connection()
        await asyncio.sleep(0.1)
        for call in silent:
            call.cancel()
        services.go.set()
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        await asyncio.gather(*(stub.Sample(LARGE) for _ in range(6)))


async def test_a_call_without_a_message_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, Services()) as (channel, _):
        call = channel.stream_unary(SAMPLE)(iter([]))
        with pytest.raises(grpc.aio.AioRpcError, match="the call has no message"):
            await call
