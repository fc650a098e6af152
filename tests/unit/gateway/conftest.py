from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.database import write_behind
from gateway.database.store import Store
from gateway.metrics import Metrics
from tests.support.hasty_uvicorn import hasty_uvicorn  # noqa: F401 - a fixture
from tests.support.postgres import Postgres, postgres  # noqa: F401 - a fixture
from tests.support.warm_database import warm_database  # noqa: F401 - a fixture
from tests.unit.gateway.stack import Client, FakeSampler, Stack

_OF_AN_EARLIER_LOOP = "PollerCompletionQueue._handle_events"
"""grpc has one poller for all event loops of a process: it may wake that of an earlier test, which is closed."""


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Function) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that `python -m gateway` runs, unless the module of a test has another one as NEW_LOOP."""
    return {"loop": getattr(item.module, "NEW_LOOP", uvloop.new_event_loop)}


@pytest.fixture
def short_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that read usage, audit events or spans: a reader waits for the next flush, which comes every second."""
    monkeypatch.setattr(write_behind, "FLUSH_S", 0.1)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A new database without a gateway."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}"
    if request.param == "postgresql":
        cluster: Postgres = request.getfixturevalue("postgres")
        url = await asyncio.to_thread(cluster.new_database)
    store = Store(url, Metrics())
    await store.migrate()
    yield store
    await store.close()


@pytest.fixture
async def stack(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Stack]:
    """`@pytest.mark.gateway(...)` gives the gateway's settings, and `sampler`, the class of the fake sampler.

    No test may leave an error in the log: a bug in a handler can hide behind an answer.
    """
    settings: dict[str, Any] = {}
    for marker in request.node.iter_markers("gateway"):  # the test's own come first
        settings = marker.kwargs | settings
    sampler = settings.pop("sampler", FakeSampler)()
    async with Stack(tmp_path, sampler).serving(**settings) as stack:
        yield stack
    errors = [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert [error for error in errors if _OF_AN_EARLIER_LOOP not in error] == []


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
        yield client


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
async def either_database(request: pytest.FixtureRequest, stack: Stack) -> None:
    """Lets the stack's gateway use the database of this name."""
    if request.param == "postgresql":
        cluster: Postgres = request.getfixturevalue("postgres")
        await stack.restart_gateway(database_url=await asyncio.to_thread(cluster.new_database))
