from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.hasty_uvicorn import hasty_uvicorn  # noqa: F401 - a fixture
from tests.unit.gateway.stack import Client, Stack

_OF_AN_EARLIER_LOOP = "PollerCompletionQueue._handle_events"
"""grpc has one poller for all event loops of a process: it may wake that of an earlier test, which is closed."""


@pytest.fixture
async def stack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Stack]:
    """No test may leave an error in the log: a bug in a handler can hide behind an answer."""
    async with Stack(tmp_path).serving() as stack:
        yield stack
    errors = [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert [error for error in errors if _OF_AN_EARLIER_LOOP not in error] == []


@pytest.fixture
async def impatient(stack: Stack) -> None:
    """A gateway that waits half a second for a trainer that does not answer. The default outwaits a busy machine."""
    await stack.restart_gateway(submit_timeout_s=0.5)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
        yield client
