"""Every error crosses a real gRPC connection with its class, message and metadata."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tinsmith import errors
from tinsmith.rpc import logs
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.errors import _BY_REASON, from_rpc_error
from tinsmith.rpc.server import Server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

FILE: FileDescriptor = sampler_pb2.DESCRIPTOR


class Failing(sampler_pb2_grpc.SamplerServiceServicer):
    def __init__(self) -> None:
        self.error: Exception = RuntimeError("boom")
        self.request_ids: list[str] = []

    async def Sample(self, request, context):
        self.request_ids.append(logs.request_id.get())
        raise self.error

    async def StreamSample(self, request, context):
        yield sampler_pb2.StreamSampleResponse(delta=sampler_pb2.SampleDelta(index=1))
        raise self.error


@pytest.fixture
async def failing() -> AsyncIterator[tuple[Failing, grpc.aio.Channel, Server]]:
    servicer = Failing()
    server = Server("127.0.0.1:0", [FILE])
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    async with connect(f"127.0.0.1:{server.port}") as channel:
        yield servicer, channel, server
    await server.stop(0)


@pytest.mark.parametrize("cls", _BY_REASON.values())
async def test_an_error_arrives_as_the_class_that_was_raised(failing, cls) -> None:
    servicer, channel, _ = failing
    servicer.error = cls("rank 96 is too large", rank=96)
    stub = sampler_pb2_grpc.SamplerServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Sample(sampler_pb2.SampleRequest())
    assert caught.value.code().name == cls.code
    error = from_rpc_error(caught.value)
    assert type(error) is cls
    assert (error.message, error.metadata, error.category) == ("rank 96 is too large", {"rank": "96"}, cls.category)


@pytest.mark.parametrize("value", ["x" * 20_000, "é" * 20_000, "😀" * 20_000, "%\0" * 20_000])
async def test_an_error_that_quotes_a_long_value_arrives_cut_in_its_middle(failing, value: str) -> None:
    servicer, channel, _ = failing
    servicer.error = errors.UnknownLossFn(f"loss_fn: {value} is not one of cross_entropy", loss_fn=value, model_id="m")
    for _ in range(5):  # gRPC drops what is somewhat too large at random
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sampler_pb2_grpc.SamplerServiceStub(channel).Sample(sampler_pb2.SampleRequest())
        error = from_rpc_error(caught.value)
        assert type(error) is errors.UnknownLossFn
        assert error.message.startswith(f"loss_fn: {value[:50]}")
        assert error.message.endswith("is not one of cross_entropy")
        assert error.metadata["model_id"] == "m"


async def test_an_unexpected_exception_tells_the_client_nothing_but_internal(failing) -> None:
    _, channel, _ = failing
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await sampler_pb2_grpc.SamplerServiceStub(channel).Sample(sampler_pb2.SampleRequest())
    error = from_rpc_error(caught.value)
    assert (type(error), error.message) == (errors.ServiceError, "internal error; the log has the cause")


async def test_a_stream_fails_after_its_first_messages(failing) -> None:
    servicer, channel, _ = failing
    servicer.error = errors.EngineDead("gone")
    stream = sampler_pb2_grpc.SamplerServiceStub(channel).StreamSample(sampler_pb2.StreamSampleRequest())
    assert (await stream.read()).delta.index == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert isinstance(from_rpc_error(caught.value), errors.EngineDead)


async def test_an_unreachable_service_is_not_ready() -> None:
    async with connect("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sampler_pb2_grpc.SamplerServiceStub(channel).Sample(sampler_pb2.SampleRequest(), timeout=5)
    assert isinstance(from_rpc_error(caught.value), errors.NotReady)


async def test_health_follows_set_serving_and_reflection_lists_the_services(failing) -> None:
    _, channel, server = failing
    assert not await is_serving(channel)
    await server.set_serving(True)
    assert await is_serving(channel)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as plain:
        names = await asyncio.to_thread(lambda: ProtoReflectionDescriptorDatabase(plain).get_services())
    assert {"tinsmith.v1.SamplerService", "grpc.health.v1.Health"} <= set(names)


async def test_reflection_answers_under_its_final_name_and_describes_itself(failing) -> None:
    _, channel, _ = failing
    ask = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    services = ["tinsmith.v1.SamplerService", "grpc.reflection.v1.ServerReflection"]
    asked = [reflection_pb2.ServerReflectionRequest(list_services="*")]
    asked += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in services]
    listed, *described = [answer async for answer in ask(iter(asked), timeout=5)]
    assert set(services) <= {one.name for one in listed.list_services_response.service}
    assert all(one.file_descriptor_response.file_descriptor_proto for one in described)


async def test_a_port_in_use_is_refused_with_its_address(failing) -> None:
    _, _, server = failing
    with pytest.raises(SystemExit, match=f"cannot listen on 127.0.0.1:{server.port}"):
        Server(f"127.0.0.1:{server.port}", [FILE])


async def test_a_request_that_is_no_protobuf_has_a_reason(failing) -> None:
    _, channel, _ = failing
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/tinsmith.v1.SamplerService/Sample")(b"\xff\xff\xff")
    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.InvalidRequest)
    assert "/tinsmith.v1.SamplerService/Sample" in error.message


async def test_log_lines_of_a_call_carry_the_request_id_that_it_brings_or_its_task_has(failing) -> None:
    servicer, channel, _ = failing
    servicer.error = errors.NotReady("loading")
    stub = sampler_pb2_grpc.SamplerServiceStub(channel)
    own = ((logs.REQUEST_ID_METADATA, "s:sample:0:1"),)
    for of_task, metadata in ("", ()), ("", own), ("m:3", ()), ("m:3", own):
        logs.request_id.set(of_task)
        servicer.request_ids.clear()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Sample(sampler_pb2.SampleRequest(), metadata=metadata, timeout=10)
        assert set(servicer.request_ids) == {"s:sample:0:1" if metadata else of_task}
