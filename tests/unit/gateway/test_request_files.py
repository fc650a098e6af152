"""docs/architecture.md lists the files of the gateway that a request passes; these tests keep the lists true."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from tests.support.request_files import listed, traced
from tests.unit.gateway.stack import Client, Stack, sample_body

_IS_TRACED: ContextVar[bool] = ContextVar("is_traced", default=False)
_EVERY, _ASKED = "Gateway: every request", "Gateway: accounts, database and dashboard"

Send = Callable[[Client, str, int], Awaitable[Any]]


@asynccontextmanager
async def traced_requests(stack: Stack) -> AsyncIterator[set[str]]:
    """The files of the gateway's code that runs for requests, and not in its background tasks."""
    assert stack.server is not None
    config = stack.server.config
    app = config.loaded_app

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        _IS_TRACED.set(True)  # tasks that the request starts inherit it
        await app(scope, receive, send)

    config.loaded_app = noted  # type: ignore[assignment]
    try:
        with traced("gateway", when=_IS_TRACED.get) as files:
            yield files
    finally:
        config.loaded_app = app


async def forward_backward(client: Client, session_id: str, seq_id: int) -> None:
    receipt = await client.forward_backward(f"{session_id}:train:0", seq_id)
    assert b"loss:sum" in await client.result(receipt.json())


async def sample(client: Client, session_id: str, seq_id: int) -> None:
    receipt = await client.call("asample", sample_body(f"{session_id}:sample:0", seq_id))
    assert isinstance(await client.result(receipt), bytes)


REQUESTS: dict[str, Send] = {"forward_backward": forward_backward, "sample": sample}


async def files_of(stack: Stack, client: Client, send: Send) -> set[str]:
    """Files of a request, and of the request for its answer."""
    session_id = await client.session()
    await client.model(session_id)
    await client.sampling_session(session_id)
    await send(client, session_id, 1)  # the first one may fill caches
    async with traced_requests(stack) as files:
        await send(client, session_id, 2)
    return files


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_passes_the_files_that_are_listed(stack: Stack, client: Client, name: str) -> None:
    files = await files_of(stack, client, REQUESTS[name])
    assert files - listed(_ASKED) == listed(_EVERY) | listed(f"Gateway: {name}")


async def test_what_requests_ask_is_asked(stack: Stack, client: Client) -> None:
    files = set[str]().union(*[await files_of(stack, client, send) for send in REQUESTS.values()])
    assert listed(_ASKED) <= files
