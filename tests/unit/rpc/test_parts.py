"""One message of very many small parts is refused before any handler loops over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tinsmith.errors import InvalidRequest
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.server import Server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2


class Sampler(sampler_pb2_grpc.SamplerServiceServicer):
    async def Sample(self, request: Any, context: Any) -> sampler_pb2.SampleResponse:
        return sampler_pb2.SampleResponse()


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    async def ForwardBackward(self, request: Any, context: Any) -> trainer_pb2.ForwardBackwardResponse:
        return trainer_pb2.ForwardBackwardResponse()


@pytest.fixture
async def stubs() -> AsyncIterator[tuple[Any, Any]]:
    server = Server("127.0.0.1:0", [sampler_pb2.DESCRIPTOR, trainer_pb2.DESCRIPTOR])
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Sampler(), server.grpc)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server.grpc)
    await server.start()
    channel = connect(f"127.0.0.1:{server.port}")
    yield sampler_pb2_grpc.SamplerServiceStub(channel), trainer_pb2_grpc.TrainerServiceStub(channel)
    await channel.close()
    await server.stop(0)


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


async def test_large_batches_and_long_lists_of_numbers_pass(stubs: tuple[Any, Any]) -> None:
    sampler, trainer = stubs
    await sampler.Sample(sampler_pb2.SampleRequest(sampling_params=NUMBERS))
    data = [types_pb2.Datum(model_input=[types_pb2.Chunk()] * 8) for _ in range(4096)]
    await trainer.ForwardBackward(trainer_pb2.ForwardBackwardRequest(data=data))
