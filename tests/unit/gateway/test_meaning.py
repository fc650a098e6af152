"""Answers of the gateway when its call of a trainer or a sampler fails."""

from __future__ import annotations

import pytest
from grpc.aio import AioRpcError, Metadata

from gateway.channel import meaning
from tinsmith.errors import InvalidRequest
from tinsmith.rpc.errors import to_status


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
