"""One message of very many small parts, or with an unknown field, is refused before any handler has it."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.waiting import until
from tinsmith.errors import InvalidRequest
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.parts import check_parts
from tinsmith.rpc.server import Server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2


class Sampler(sampler_pb2_grpc.SamplerServiceServicer):
    async def Sample(self, request: Any, context: Any) -> sampler_pb2.SampleResponse:
        return sampler_pb2.SampleResponse()


class Held:
    """An object of a handler's frame, as its message is."""


held: list[weakref.ref[Held]] = []


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    async def ForwardBackward(self, request: Any, context: Any) -> trainer_pb2.ForwardBackwardResponse:
        one = Held()
        held.append(weakref.ref(one))
        if request.model_id == "refused":
            raise InvalidRequest("model_id: is refused", field="model_id")
        return trainer_pb2.ForwardBackwardResponse()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", [sampler_pb2.DESCRIPTOR, trainer_pb2.DESCRIPTOR])
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Sampler(), server.grpc)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server.grpc)
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def stubs(server: Server) -> AsyncIterator[tuple[Any, Any]]:
    async with connect(f"127.0.0.1:{server.port}") as channel:
        yield sampler_pb2_grpc.SamplerServiceStub(channel), trainer_pb2_grpc.TrainerServiceStub(channel)


MANY = 200_000
STRINGS = sampler_pb2.SamplingParams(stop=sampler_pb2.StopCondition(strings=[""] * MANY))
NUMBERS = sampler_pb2.SamplingParams(stop=sampler_pb2.StopCondition(token_ids=range(MANY)))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (sampler_pb2.SampleRequest(prompt=[types_pb2.Chunk()] * MANY), "prompt"),
        (sampler_pb2.SampleRequest(sampling_params=STRINGS), "sampling_params.stop.strings"),
        (trainer_pb2.ForwardBackwardRequest(data=[types_pb2.Datum()] * MANY), "data"),
        (
            trainer_pb2.ForwardBackwardRequest(data=[types_pb2.Datum(model_input=[types_pb2.Chunk()] * MANY)]),
            "data[0].model_input",
        ),
        (trainer_pb2.ForwardBackwardRequest(loss_fn_config={str(n): 0.0 for n in range(MANY)}), "loss_fn_config"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_a_message_of_very_many_parts_is_refused_by_the_field(
    stubs: tuple[Any, Any], message: Any, field: str
) -> None:
    sampler, trainer = stubs
    call = sampler.Sample if isinstance(message, sampler_pb2.SampleRequest) else trainer.ForwardBackward
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its meaning is looked at below
        await call(message)
    meant = from_rpc_error(raised.value)  # type: ignore[arg-type]
    assert isinstance(meant, InvalidRequest)
    assert (meant.metadata["field"], "more than 131072 parts" in meant.message) == (field, True)


def field(number: int, value: bytes) -> bytes:
    """A field of a few bytes on the wire."""
    return bytes([number << 3 | 2, len(value)]) + value


BATCH: Any = trainer_pb2.ForwardBackwardRequest.DESCRIPTOR
DATA = BATCH.fields_by_name["data"].number


SEQ_ID: Any = bytes([BATCH.fields_by_name["seq_id"].number << 3]) + b"\0"


def test_very_many_numbers_that_are_not_packed_are_refused() -> None:
    check_parts(SEQ_ID * 1_048_576, BATCH)
    with pytest.raises(InvalidRequest, match="ForwardBackwardRequest: the message has more than 1048576 fields"):
        check_parts(SEQ_ID * 1_048_577, BATCH)
    with pytest.raises(InvalidRequest, match="more than 1048576 fields"):
        check_parts(field(DATA, b"") * 131_072 + SEQ_ID * 1_000_000, BATCH)


def tensor(body: bytes) -> bytes:
    """A batch on the wire, with this tensor in the inputs of its second datum."""
    inputs = field(2, field(1, b"advantages") + field(2, body))
    return field(DATA, b"") + field(DATA, inputs)


IN_A_TENSOR = r"^data\[1\]\.loss_fn_inputs\[0\]\.value\."
LARGE = trainer_pb2.ForwardBackwardRequest(loss_fn="x" * 100_000).SerializeToString()


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"\xb8\x3e\x01", "^field number 999: "),
        (b"\xb9\x3e" + bytes(8), "^field number 999: "),
        (b"\xba\x3e\x01x", "^field number 999: "),
        (b"\xbb\x3e\xbc\x3e", "^field number 999: "),
        (b"\xbd\x3e" + bytes(4), "^field number 999: "),
        (field(BATCH.fields_by_name["seq_id"].number, b"7"), "^field number 2: "),  # a text instead of a number
        (tensor(b"\xb8\x3e\x01"), IN_A_TENSOR + "field number 999: "),
    ],
)
@pytest.mark.parametrize("rest", [b"", LARGE], ids=["small", "large"])
async def test_a_field_that_the_server_does_not_know_is_refused_by_its_number_at_any_depth(
    stubs: tuple[Any, Any], body: bytes, where: str, rest: bytes
) -> None:
    message = trainer_pb2.ForwardBackwardRequest.FromString(body + rest)  # it keeps what it does not know
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its meaning is looked at below
        await stubs[1].ForwardBackward(message)
    meant = from_rpc_error(raised.value)  # type: ignore[arg-type]
    assert isinstance(meant, InvalidRequest)
    assert re.search(where + "this server knows no such field and cannot apply it; leave it out$", meant.message)


async def test_clients_of_the_common_services_may_be_newer(stubs: tuple[Any, Any], server: Server) -> None:
    request = health_pb2.HealthCheckRequest.FromString(b"\xba\x3e\x01x")
    async with connect(f"127.0.0.1:{server.port}") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(request)


def test_numbers_of_a_list_are_known_packed_and_one_by_one() -> None:
    number = sampler_pb2.StopCondition.DESCRIPTOR.fields_by_name["token_ids"].number
    for body in (field(number, b"\1\2"), bytes([number << 3]) + b"\1" + bytes([number << 3]) + b"\2"):
        check_parts(body, sampler_pb2.StopCondition.DESCRIPTOR)


def test_a_tensor_of_very_many_dimensions_is_refused_before_it_is_decoded() -> None:
    def body(num_dimensions: int) -> bytes:
        inputs = {"target_tokens": types_pb2.Tensor(shape=[1] * num_dimensions)}
        return trainer_pb2.ForwardBackwardRequest(data=[types_pb2.Datum(loss_fn_inputs=inputs)]).SerializeToString()

    check_parts(body(8), BATCH)
    with pytest.raises(InvalidRequest, match="shape: the tensor has too many dimensions"):
        check_parts(body(MANY), BATCH)


@pytest.mark.parametrize(
    "end", [b"\x80", bytes([DATA << 3 | 2]), bytes([DATA << 3 | 2, 0x7F]), b"\xff" * 11, b"\x07", b""]
)
def test_a_broken_message_is_left_to_the_decoder(end: bytes) -> None:
    check_parts(field(DATA, field(1, b"")) * 8 + end, BATCH)


def test_the_parts_before_a_break_are_counted() -> None:
    """The decoder would make them all before it comes to the break."""
    datum = types_pb2.Datum(model_input=[types_pb2.Chunk()] * 131_071)
    many = trainer_pb2.ForwardBackwardRequest(data=[datum]).SerializeToString()
    check_parts(many, BATCH)
    with pytest.raises(InvalidRequest, match=r"data\[0\]\.model_input: the message has more than 131072 parts"):
        check_parts(many + field(DATA, b"\x0a\xff"), BATCH)  # the second datum ends within a length


def test_parts_are_counted_on_the_wire_as_in_the_decoded_message() -> None:
    """At the limit it passes, and one part more is refused, wherever the parts are."""
    chunks = [types_pb2.Datum(model_input=[types_pb2.Chunk()] * 31) for _ in range(4096)]
    at_limit = trainer_pb2.ForwardBackwardRequest(data=chunks)
    check_parts(at_limit.SerializeToString(), BATCH)
    at_limit.loss_fn_config["beta"] = 1.0
    with pytest.raises(InvalidRequest, match="more than 131072 parts"):
        check_parts(at_limit.SerializeToString(), BATCH)


async def test_large_batches_and_long_lists_of_numbers_pass(stubs: tuple[Any, Any]) -> None:
    sampler, trainer = stubs
    await sampler.Sample(sampler_pb2.SampleRequest(sampling_params=NUMBERS))
    data = [types_pb2.Datum(model_input=[types_pb2.Chunk()] * 8) for _ in range(4096)]
    await trainer.ForwardBackward(trainer_pb2.ForwardBackwardRequest(data=data))


async def test_a_refused_call_leaves_nothing_of_its_handler_for_the_garbage_collector(stubs: tuple[Any, Any]) -> None:
    """45 messages of 60 MB that were refused stayed in memory for minutes."""
    held.clear()
    gc.disable()
    try:
        with pytest.raises(grpc.aio.AioRpcError, match="model_id: is refused"):
            await stubs[1].ForwardBackward(trainer_pb2.ForwardBackwardRequest(model_id="refused"))
        await until(lambda: held[0]() is None, limit_s=3)
    finally:
        gc.enable()
