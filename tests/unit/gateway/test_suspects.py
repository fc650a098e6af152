"""Deaths of samplers that requests may have caused, in the database of one or several gateways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from gateway.database.store import Store
from gateway.database.tables.samples import SuspectRow
from gateway.metrics import Metrics
from gateway.sampling import suspects as module
from gateway.sampling.lives import Suspicion
from gateway.sampling.suspects import Suspects
from tests.support.postgres import Postgres


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}"
    if request.param == "postgresql":
        cluster: Postgres = request.getfixturevalue("postgres")
        url = await asyncio.to_thread(cluster.new_database)
    store = Store(url, Metrics())
    await store.migrate()
    yield store
    await store.close()


async def found(store: Store, content: str) -> tuple[int, bool]:
    """What a gateway finds that starts now."""
    suspects = Suspects(store)
    await suspects.read()
    mine = suspects.find(content)
    return mine.deaths, mine.is_condemned


async def num_rows(store: Store) -> int:
    return await store.first(select(func.count()).select_from(SuspectRow))


async def test_each_death_is_written_before_the_request_goes_on(store: Store) -> None:
    suspects = Suspects(store)
    assert suspects.are_none
    await asyncio.gather(*(suspects.note(content, Suspicion(1)) for content in "abc"))
    assert [await found(store, content) for content in "abcd"] == [(1, False)] * 3 + [(0, False)]
    await suspects.note("a", Suspicion(2, is_condemned=True))
    assert await found(store, "a") == (2, True)
    assert await num_rows(store) == 3


async def test_an_answer_ends_the_suspicion(store: Store) -> None:
    suspects = Suspects(store)
    await suspects.note("a", Suspicion(1))
    suspects.acquit("a")
    suspects.acquit("never a suspect")
    assert suspects.are_none
    await suspects.read()  # before that is written
    assert suspects.are_none
    await suspects.behind.flush()
    assert await num_rows(store) == 0


async def test_suspects_are_forgotten_after_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    suspects = Suspects(store)
    await suspects.note("a", Suspicion(2, is_condemned=True))
    later = time.time() + module.KEPT_S
    monkeypatch.setattr(module.time, "time", lambda: later)
    assert suspects.find("a").deaths == 0
    assert suspects.are_none
    assert await found(store, "a") == (0, False)
    await suspects.note("b", Suspicion(1))
    assert await num_rows(store) == 1


async def test_suspects_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    suspects = Suspects(store)
    for n in range(8):
        await suspects.note(str(n), Suspicion(1))
    assert [suspects.find(str(n)).deaths for n in range(8)] == [0] * 5 + [1] * 3
    assert await num_rows(store) == 3


async def test_without_a_database_they_are_counted_in_memory_and_written_later(store: Store) -> None:
    suspects = Suspects(store)
    async with store.begin() as db:
        await (await db.connection()).exec_driver_sql("ALTER TABLE suspects RENAME TO away")
    await suspects.note("a", Suspicion(1))
    assert suspects.find("a").deaths == 1
    async with store.begin() as db:
        await (await db.connection()).exec_driver_sql("ALTER TABLE away RENAME TO suspects")
    await suspects.behind.flush()
    assert await found(store, "a") == (1, False)
