"""Answers of the gateway when its call of a trainer or a sampler fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from grpc.aio import AioRpcError, Metadata

from gateway.channel import connect, meaning
from tests.unit.gateway.stack import Backend
from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.rpc.errors import to_status
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        ("request.sampling_params.top_p", "sampling_params.top_p"),
        ("chat.messages", "messages"),
        ("header.location", "location"),
        ("prompt", "prompt"),
    ],
)
def test_a_field_within_a_message_that_http_does_not_have_is_named_without_it(field: str, shown: str) -> None:
    status = to_status(InvalidRequest(f"{field}: 2 is too much", field=field))
    trailing = Metadata(*(status.trailing_metadata or ()))
    found = meaning(AioRpcError(status.code, Metadata(), trailing, details=status.details))
    assert (found.message, found.metadata) == (f"{shown}: 2 is too much", {"field": shown})


class EarlyRefusal(trainer_pb2_grpc.TrainerServiceServicer):
    """A trainer that refuses an upload while it is sent."""

    num_read = 0
    """Number of messages that it reads before."""

    async def ImportCheckpoint(self, request_iterator: Any, context: Any) -> Any:
        for _ in range(self.num_read):
            await anext(request_iterator)
        raise InvalidRequest("archive: refused", field="archive")


async def test_a_refusal_is_heard_by_a_caller_who_is_still_writing() -> None:
    """gRPC makes "Internal error from Core" of about half of these."""
    trainer = EarlyRefusal()
    backend = Backend(trainer, "trainer")
    await backend.start()
    channel = connect(f"127.0.0.1:{backend.port}")
    stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
    message = trainer_pb2.ImportCheckpointRequest(archive=bytes(500_000))
    try:
        for number in range(30):
            trainer.num_read = (1, 2, 4)[number % 3]
            call = stub.ImportCheckpoint()
            with contextlib.suppress(ServiceError, asyncio.InvalidStateError):
                for _ in range(40):
                    await call.write(message)
            with pytest.raises(InvalidRequest, match="archive: refused"):
                await call
    finally:
        await channel.close()
        await backend.stop()
